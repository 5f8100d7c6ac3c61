"""llama.cpp through llama-cpp-python's low-level API: one context, a unified KV cache, many sequences.

Bad calls abort the process (GGML_ASSERT, C++ exceptions through ctypes), so nothing reaches the library unchecked:
token ids are checked when a prompt is prepared, batches are bounded by n_batch, positions are consecutive because the
engine alone writes them, only output rows are sampled, and the KV cache cannot run full because every sequence has its
worst case reserved.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np

from backend_service.engines.base import Admission, EngineInfo, KvUse, Slice, StepResult
from backend_service.engines.llama_model import LlamaModel, complaint
from backend_service.engines.llama_sampling import LlamaSampler
from backend_service.kv_pool import KvPool, PoolLimits
from service_kit.faults import EngineFailed, StartupFailed
from service_kit.requests import Prompt, Sampling

MAX_STEP_TOKENS = 512
"""n_batch and n_ubatch: the largest step."""
KV_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
_CELL_PADDING = 256
_PREPARED_PROMPTS = 32
"""Tokenized prompts remembered: a router's CacheProbe and the Generate after it bring the same one."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """How to run a context."""

    limits: PoolLimits
    """`capacity_tokens` is rounded up to llama.cpp's cell padding of 256."""
    threads: int = 1
    kv_type: str = "f16"
    device: str = "CPU"
    """For people."""


class LlamaCppEngine:
    """Implements `Engine`."""

    def __init__(self, model: LlamaModel, config: LlamaConfig) -> None:
        """Raises `StartupFailed` when the context does not fit the machine."""
        cells = -(-config.limits.capacity_tokens // _CELL_PADDING) * _CELL_PADDING
        limits = PoolLimits(cells, config.limits.max_live, config.limits.max_retained, config.limits.retained_tokens)
        context = llama_cpp.llama_init_from_model(model.pointer, _context_params(config, limits))
        if not context:
            raise StartupFailed(
                f"llama.cpp cannot make a context of {cells} tokens ({complaint()}); lower --kv-tokens."
            )
        weakref.finalize(self, _free_context, context, model)
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._model = model
        self._pool = KvPool(limits, share=model.divisible)
        self._sequences: dict[int, _Sequence] = {}
        self._batch = _Batch(MAX_STEP_TOKENS)
        self.info = EngineInfo(
            name="llama_cpp",
            device=config.device,
            simulated=False,
            model_name=model.name,
            model_fingerprint=model.fingerprint,
            context_tokens=min(cells, model.train_context_tokens),
            max_step_tokens=MAX_STEP_TOKENS,
            vocabulary=model.vocabulary,
        )
        self._tokenize = functools.lru_cache(_PREPARED_PROMPTS)(
            functools.partial(model.tokenize, context_tokens=self.info.context_tokens)
        )

    def prepare(self, prompt: Prompt) -> Sequence[int]:
        """See `Engine.prepare`."""
        return self._tokenize(prompt)

    def probe(self, tokens: Sequence[int]) -> int:
        """See `Engine.probe`."""
        return self._pool.probe(tokens)

    def admit(
        self, tokens: Sequence[int], max_new_tokens: int, sampling: Sampling, *, ignore_eos: bool
    ) -> Admission | None:
        """See `Engine.admit`."""
        placement = self._pool.place(tokens, max_new_tokens)
        if placement is None:
            return None
        handle, reused = placement.handle, placement.reused_tokens
        if placement.source is not None:
            llama_cpp.llama_memory_seq_cp(self._memory, placement.source, handle, 0, reused)
        self._drop(placement.dropped)
        sampler = LlamaSampler(sampling, self.info.vocabulary, ignore_eos=ignore_eos, prompt=tokens)
        self._sequences[handle] = _Sequence(sampler, computed_tokens=reused, known=list(tokens[reused:]))
        return Admission(handle, reused)

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """See `Engine.step`."""
        output_rows: dict[int, int] = {}
        self._batch.clear()
        for piece in slices:
            sequence = self._sequences[piece.handle]
            last = piece.tokens == len(sequence.known)
            row = self._batch.add(piece.handle, sequence.known[: piece.tokens], sequence.computed_tokens, output=last)
            if last:
                output_rows[piece.handle] = row
        if code := llama_cpp.llama_decode(self._context, self._batch.struct):
            self._reset()
            raise EngineFailed(
                f"llama.cpp could not compute a step (code {code}: {complaint()}); "
                "the request's work on this backend is lost, send it again."
            )
        sampled: dict[int, list[int]] = {}
        for piece in slices:
            sequence = self._sequences[piece.handle]
            computed, sequence.known = sequence.known[: piece.tokens], sequence.known[piece.tokens :]
            sequence.computed_tokens += piece.tokens
            self._pool.grow(piece.handle, computed)
            if piece.handle in output_rows:
                token = sequence.sampler.sample(self._context, output_rows[piece.handle])
                sequence.known.append(token)
                sampled[piece.handle] = [token]
        if not output_rows:  # nothing read a result: wait for it, so that a step's time is the step's time
            llama_cpp.llama_synchronize(self._context)
        return StepResult(sampled)

    def release(self, handle: int, *, retain: bool) -> None:
        """See `Engine.release`."""
        del self._sequences[handle]
        self._drop(self._pool.release(handle, retain=retain))

    def stats(self) -> KvUse:
        """See `Engine.stats`."""
        return self._pool.use()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books add up and llama.cpp's own positions agree with them."""
        self._pool.check_integrity()
        for handle, length in self._pool.lengths().items():
            end = llama_cpp.llama_memory_seq_pos_max(self._memory, handle) + 1
            assert end == length, f"sequence {handle} has {end} cells in llama.cpp and {length} in the books"

    def _drop(self, handles: Sequence[int]) -> None:
        for handle in handles:
            llama_cpp.llama_memory_seq_rm(self._memory, handle, -1, -1)

    def _reset(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        self._pool.clear()
        self._sequences.clear()


@dataclass(slots=True)
class _Sequence:
    sampler: LlamaSampler
    computed_tokens: int
    known: list[int]
    """Known tokens that are not computed yet."""


class _Batch:
    """A llama_batch over numpy buffers, each token in one sequence."""

    def __init__(self, capacity: int) -> None:
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._sequence = np.zeros(capacity, np.int32)
        self._output = np.zeros(capacity, np.int8)
        self._one = np.ones(capacity, np.int32)
        rows = self._sequence.ctypes.data + np.arange(capacity, dtype=np.uintp) * self._sequence.itemsize
        self._rows = rows.astype(np.uintp)
        self._count = 0
        self.struct = llama_cpp.llama_batch(
            0,
            self._token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            None,
            self._pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            self._one.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._rows.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            self._output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        """Start a new batch."""
        self._count = self.struct.n_tokens = 0

    def add(self, handle: int, tokens: Sequence[int], position: int, *, output: bool) -> int:
        """Append a run of tokens from `position` on; the row of its last one. numpy raises before the end overflows."""
        start, end = self._count, self._count + len(tokens)
        self._token[start:end] = tokens
        self._pos[start:end] = np.arange(position, position + len(tokens))
        self._sequence[start:end] = handle
        self._output[start:end] = 0
        self._output[end - 1] = output
        self._count = self.struct.n_tokens = end
        return end - 1


def _context_params(config: LlamaConfig, limits: PoolLimits) -> llama_cpp.llama_context_params:
    params: llama_cpp.llama_context_params = llama_cpp.llama_context_default_params()
    params.n_ctx = limits.capacity_tokens
    params.n_batch = params.n_ubatch = MAX_STEP_TOKENS
    params.n_seq_max = limits.handles
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = config.threads
    params.type_k = params.type_v = KV_TYPES[config.kv_type]
    if config.kv_type != "f16":  # a quantised V cache exists only under flash attention
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    return params


def _free_context(context: llama_cpp.llama_context_p, _model: LlamaModel) -> None:
    """The model argument keeps the weights alive until the context that uses them is gone."""
    llama_cpp.llama_free(context)
