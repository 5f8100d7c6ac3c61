"""llama.cpp through llama-cpp-python's low-level API: one context, a unified KV cache, many sequences.

Bad calls abort the process (GGML_ASSERT, C++ exceptions through ctypes), so nothing reaches the library unchecked:
token ids are checked when a prompt is prepared, batches are bounded by n_batch, positions are consecutive because the
engine alone writes them, only output rows are sampled, and the KV cache cannot run full because every sequence has its
worst case reserved.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from backend_service.engines.base import Admission, EngineInfo, KvUse, Slice, StepResult
from backend_service.engines.idle_check import IdleCheck
from backend_service.engines.llama_batch import LlamaBatch
from backend_service.engines.llama_cells import LlamaCells
from backend_service.engines.llama_model import LlamaModel, complaint
from backend_service.engines.llama_sampling import LlamaSampler
from backend_service.engines.llama_sequence import LlamaSequence
from backend_service.kv_pool import Eviction, KvPool, PoolLimits
from backend_service.speculation.base import Proposer
from service_kit.faults import EngineFailed, StartupFailed
from service_kit.requests import Prompt, Sampling

MAX_STEP_TOKENS = 512
"""n_batch: the largest step."""
_CPU_UBATCH_TOKENS = 60
"""Rows that a CPU computes at a time. With 64 or more llama.cpp's flash attention changes over to another kernel, which
rounds differently: an answer would depend on who else is in the step. It also saves working memory."""
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
    """`capacity_tokens` is rounded up to llama.cpp's cell padding of 256; `host_tokens` follows from `host_bytes`."""
    threads: int = 1
    kv_type: str = "f16"
    flash_attention: bool = True
    """Its sums over a context run in the order of positions, wherever the cells lie, so that a greedy answer is the
    same alone, batched and on a warm prefix. Without it a CPU decodes long contexts faster (docs/measurements.md), but
    rounding depends on the cells' places, and near ties with it. A quantised KV cache exists only with it."""
    cpu_only: bool = True
    """No layer is on a GPU."""
    host_bytes: int = 0
    """Host memory for prefixes that had to leave the KV cache."""
    device: str = "CPU"
    """For people."""


class LlamaCppEngine:
    """Implements `Engine`."""

    def __init__(self, model: LlamaModel, config: LlamaConfig, proposer: Proposer | None = None) -> None:
        """`proposer`: guesses tokens ahead (speculative decoding). Raises `StartupFailed` when the context does not fit
        the machine, or guesses the model."""
        if proposer and not model.shares_prefixes:
            raise StartupFailed(
                f"{model.name} keeps a state that cannot be cut back (recurrent, hybrid or sliding window), so wrong "
                "guesses could not be taken back; leave out --speculate."
            )
        cells = -(-config.limits.capacity_tokens // _CELL_PADDING) * _CELL_PADDING
        scratch = config.limits.handles
        context = llama_cpp.llama_init_from_model(model.pointer, _context_params(config, cells, sequences=scratch + 1))
        if not context:
            raise StartupFailed(
                f"llama.cpp cannot make a context of {cells} tokens ({complaint()}); lower --kv-tokens."
            )
        weakref.finalize(self, _free_context, context, model)
        self._context = context
        self._cells = LlamaCells(context, scratch=scratch)
        self._pool = KvPool(
            replace(config.limits, capacity_tokens=cells, host_tokens=self._host_tokens(model, config.host_bytes)),
            share=model.shares_prefixes,
        )
        self._proposer = proposer
        self._sequences: dict[int, LlamaSequence] = {}
        self._batch = LlamaBatch(MAX_STEP_TOKENS)
        self._idle_check = IdleCheck(self.check_integrity, self.clear_cache)
        self.info = EngineInfo(
            name="llama_cpp",
            device=config.device,
            simulated=False,
            model_name=model.name,
            model_fingerprint=model.fingerprint,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            precision=model.precision,
            context_tokens=min(cells, model.train_context_tokens),
            max_step_tokens=MAX_STEP_TOKENS,
            vocabulary=model.vocabulary,
            shares_prefixes=model.shares_prefixes,
        )
        context_tokens = self.info.context_tokens
        self._tokenize = functools.lru_cache(_PREPARED_PROMPTS)(
            lambda prompt, _cache_salt: model.tokenize(prompt, context_tokens=context_tokens)
        )

    def prepare(self, prompt: Prompt, cache_salt: str = "") -> Sequence[int]:
        """See `Engine.prepare`."""
        return self._tokenize(prompt, cache_salt)

    def probe(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """See `Engine.probe`."""
        return self._pool.probe(tokens, cache_salt)

    def admit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        ignore_eos: bool,
        generated: int = 0,
        cache_salt: str = "",
    ) -> Admission | None:
        """See `Engine.admit`."""
        placement = self._pool.place(tokens, max_new_tokens, cache_salt)
        if placement is None:
            return None
        handle, reused = placement.handle, placement.reused_tokens
        if placement.source is not None:
            self._cells.share(placement.source, handle, reused)
        self._evict(placement.evicted)
        for stored in placement.restorable:
            end = min(stored.block.end, len(tokens) - 1)
            assert isinstance(stored.payload, bytes)
            if not self._cells.restore(handle, stored.payload, reused, end):
                break
            self._pool.grow(handle, tokens[reused:end])
            reused = end
        sampler = LlamaSampler(sampling, self.info.vocabulary, ignore_eos=ignore_eos, prompt=tokens, drawn=generated)
        self._sequences[handle] = LlamaSequence(sampler, reused, list(tokens[reused:]))
        if self._proposer:
            self._proposer.start(handle, tokens)
        return Admission(handle, reused)

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """See `Engine.step`."""
        guesses = self._guess(slices)
        self._batch.clear()
        places: list[tuple[int, int, int]] = []
        for piece in slices:
            sequence = self._sequences[piece.handle]
            tokens, outputs = sequence.rows(piece.tokens, guesses.get(piece.handle, ()))
            first = self._batch.outputs
            row = self._batch.add(piece.handle, tokens, sequence.computed_tokens, outputs=outputs)
            places.append((row, first, first + outputs))
        if code := llama_cpp.llama_decode(self._context, self._batch.struct):
            self._reset()
            raise EngineFailed(
                f"llama.cpp could not compute a step (code {code}: {complaint()}); "
                "the request's work on this backend is lost, send it again."
            )
        logits = self._logits()
        sampled: dict[int, Sequence[int]] = {}
        for piece, (row, first, end) in zip(slices, places, strict=True):
            sequence = self._sequences[piece.handle]
            drawn = sequence.draw(self._context, row, logits[first:end])
            self._pool.grow(piece.handle, sequence.advance(piece.tokens, drawn))
            if drawn:
                sampled[piece.handle] = drawn
                if len(drawn) < end - first:
                    self._cells.cut(piece.handle, sequence.computed_tokens)
                if self._proposer:
                    self._proposer.accept(piece.handle, drawn)
        return StepResult(sampled, {handle: len(guess) for handle, guess in guesses.items()})

    def release(self, handle: int, *, retain: bool) -> None:
        """See `Engine.release`."""
        del self._sequences[handle]
        if self._proposer:
            self._proposer.forget(handle)
        self._evict(self._pool.release(handle, retain=retain))
        if not self._sequences:
            self._idle_check.run()

    def stats(self) -> KvUse:
        """See `Engine.stats`."""
        return self._pool.use()

    def clear_cache(self) -> None:
        """Forget every prefix, in the KV cache and in host memory. Nothing may be running."""
        self._reset()
        self._pool.clear_host()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books add up and llama.cpp's own positions agree with them."""
        self._pool.check_integrity()
        for handle, length in self._pool.lengths().items():
            end = self._cells.length(handle)
            assert end == length, f"sequence {handle} has {end} cells in llama.cpp and {length} in the books"

    def _guess(self, slices: Sequence[Slice]) -> Mapping[int, Sequence[int]]:
        """What the proposer thinks comes next, by handle; only where it thinks something."""
        if self._proposer is None:
            return {}
        wanted = {piece.handle: piece.guesses for piece in slices if piece.guesses}
        guesses = self._proposer.guess(wanted) if wanted else {}
        return {handle: guess for handle, guess in guesses.items() if guess}

    def _logits(self) -> NDArray[np.float32]:
        """The outputs of the last step, (outputs, vocabulary), in the order of the batch; waits for them, so that a
        step's time is the step's time."""
        if not self._batch.outputs:
            llama_cpp.llama_synchronize(self._context)
            return np.empty((0, 0), np.float32)
        pointer = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, (self._batch.outputs, self.info.vocabulary.size))

    def _evict(self, evictions: Sequence[Eviction]) -> None:
        for eviction in evictions:
            for block in eviction.save:
                self._pool.stash(block, self._cells.save(eviction.handle, block))
            self._cells.cut(eviction.handle, eviction.keep_tokens)

    def _reset(self) -> None:
        self._cells.clear()
        self._pool.clear()
        if self._proposer:
            for handle in self._sequences:
                self._proposer.forget(handle)
        self._sequences.clear()

    def _host_tokens(self, model: LlamaModel, host_bytes: int) -> int:
        """Tokens that fit the second tier."""
        if not (host_bytes and model.shares_prefixes):
            return 0
        token_bytes = self._cells.bytes_per_token(next(iter(model.vocabulary.eos), 0))
        return host_bytes // token_bytes if token_bytes else 0


def _context_params(config: LlamaConfig, cells: int, *, sequences: int) -> llama_cpp.llama_context_params:
    if config.kv_type != "f16" and not config.flash_attention:
        raise StartupFailed(f"A {config.kv_type} KV cache needs flash attention; turn it on, or use f16.")
    params: llama_cpp.llama_context_params = llama_cpp.llama_context_default_params()
    params.n_ctx = cells
    params.n_batch = MAX_STEP_TOKENS
    params.n_ubatch = _CPU_UBATCH_TOKENS if config.cpu_only else MAX_STEP_TOKENS
    params.n_seq_max = sequences
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = config.threads
    params.type_k = params.type_v = KV_TYPES[config.kv_type]
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if config.flash_attention else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    return params


def _free_context(context: llama_cpp.llama_context_p, _model: LlamaModel) -> None:
    """The model argument keeps the weights alive until the context that uses them is gone."""
    llama_cpp.llama_free(context)
