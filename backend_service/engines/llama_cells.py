"""The cells of one llama.cpp context: sequences shared, cut, copied out to host memory and back."""

from __future__ import annotations

import ctypes

import llama_cpp

from backend_service.host_tier import Block


class LlamaCells:
    """Mirrors a `KvPool`'s decisions in llama.cpp's unified KV cache. Engine thread."""

    def __init__(self, context: llama_cpp.llama_context_p, *, scratch: int) -> None:
        """`scratch`: a sequence id that nobody else uses."""
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._scratch = scratch
        self._buffer = (ctypes.c_uint8 * 0)()

    def share(self, source: int, target: int, tokens: int) -> None:
        """The first tokens of one sequence become another's too; no data is copied."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, tokens)

    def cut(self, handle: int, keep_tokens: int) -> None:
        """Forget what comes after a sequence's first tokens; cells that nobody else references are free."""
        llama_cpp.llama_memory_seq_rm(self._memory, handle, keep_tokens, -1)

    def length(self, handle: int) -> int:
        """Tokens that llama.cpp has of a sequence, if it has them from the first on."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, handle)) + 1

    def clear(self) -> None:
        """Forget everything."""
        llama_cpp.llama_memory_clear(self._memory, True)

    def save(self, handle: int, block: Block) -> bytes:
        """A copy of some of a sequence's cells. They are saved alone, by way of the scratch sequence, because
        llama.cpp only knows how to save whole sequences."""
        llama_cpp.llama_memory_seq_cp(self._memory, handle, self._scratch, block.start, block.end)
        size = llama_cpp.llama_state_seq_get_size(self._context, self._scratch)
        if size > len(self._buffer):
            self._buffer = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(self._context, self._buffer, len(self._buffer), self._scratch)
        self.cut(self._scratch, 0)
        return ctypes.string_at(self._buffer, written)

    def restore(self, handle: int, data: bytes, start: int, end: int) -> bool:
        """Put saved cells back: of what was saved, the positions start .. end - 1, which must continue the sequence.
        False, with nothing changed, when there is no room."""
        source = ctypes.cast(ctypes.c_char_p(data), ctypes.POINTER(ctypes.c_uint8))
        if not llama_cpp.llama_state_seq_set_data(self._context, source, len(data), self._scratch):
            self.cut(self._scratch, 0)
            return False
        llama_cpp.llama_memory_seq_cp(self._memory, self._scratch, handle, start, end)
        self.cut(self._scratch, 0)
        return True

    def bytes_per_token(self, token: int) -> int:
        """What a saved token takes, measured by computing one. The cache must be empty, and is so afterwards."""
        batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(token), 1)
        if llama_cpp.llama_decode(self._context, batch):
            return 0
        size: int = llama_cpp.llama_state_seq_get_size(self._context, 0)
        self.clear()
        return size
