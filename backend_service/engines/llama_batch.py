"""A llama_batch over numpy buffers that are allocated once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np


class LlamaBatch:
    """Rows of (token, position, sequence, output?), each in one sequence."""

    def __init__(self, capacity: int) -> None:
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._sequence = np.zeros(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        self._one = np.ones(capacity, np.int32)
        self._range = np.arange(capacity, dtype=np.int32)
        rows = self._sequence.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._sequence.itemsize
        self._rows = rows.astype(np.uintp)
        self.struct = llama_cpp.llama_batch(
            0,
            self._token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            None,
            self._pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            self._one.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        self.outputs = 0
        """Rows so far whose logits are wanted."""

    def clear(self) -> None:
        """Start a new batch."""
        self.struct.n_tokens = self.outputs = 0

    def add(self, handle: int, tokens: Sequence[int], position: int, *, outputs: int) -> int:
        """Append a run of tokens from `position` on, the last `outputs` of them with logits; the row of the first of
        these. Raises IndexError or ValueError, from numpy, where the batch would overflow."""
        start: int = self.struct.n_tokens
        count = len(tokens)
        if count == 1:  # a decode row: several times cheaper than the slices below
            self._token[start] = tokens[0]
            self._pos[start] = position
            self._sequence[start] = handle
            self._output[start] = outputs
        else:
            end = start + count
            self._token[start:end] = tokens
            np.add(self._range[:count], position, out=self._pos[start:end])
            self._sequence[start:end] = handle
            self._output[start : end - outputs] = 0
            self._output[end - outputs : end] = 1
        self.struct.n_tokens = start + count
        self.outputs += outputs
        return start + count - outputs
