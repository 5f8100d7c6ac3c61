"""MLX through mlx-lm's models and batched KV caches: Metal on a Mac, CUDA or CPU on Linux.

mlx-lm's own `BatchGenerator` decides by itself what a step computes; here the scheduler does. So the engine uses what
lies under it: the model, and caches that merge, extend, filter and extract. A step is at most one forward pass for the
decoding rows and one for each group of prompt chunks of about the same length; the last token of a prompt is computed
with the decoding rows, since it needs logits like them.

Everything that MLX computes stays on the engine's thread: streams and lazy arrays belong to the thread that made them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from backend_service.engines.base import Admission, EngineInfo, KvUse, Slice, StepResult
from backend_service.engines.idle_check import IdleCheck
from backend_service.engines.mlx_model import MlxModel
from backend_service.engines.mlx_rows import Batches, Caches, Rows, compact, cut, group
from backend_service.engines.mlx_sampling import MlxSampler, draw
from backend_service.kv_pool import Eviction, KvPool, PoolLimits
from service_kit.faults import EngineFailed
from service_kit.requests import Prompt, Sampling

MAX_STEP_TOKENS = 512
MAX_GPU_STEP_TOKENS = 2048
_PADDING_TOKENS = 32
_GPU_PADDING_TOKENS = 128
"""Padding that costs about as much as a forward pass more: more of it in one pass is not worth saving another."""
_BUFFER_CACHE_BYTES = 256 << 20
"""Freed buffers that MLX may keep for reuse. Joining and leaving a batch makes new ones of every size."""
_PREPARED_PROMPTS = 32
"""Tokenized prompts remembered: a router's CacheProbe and the Generate after it bring the same one."""


@dataclass(frozen=True, slots=True)
class MlxConfig:
    """How to run a model."""

    limits: PoolLimits
    """`capacity_tokens` is what a padded batch and the retained prefixes may hold together."""
    run_ahead: bool = False
    """Start a decode step before its turn, on the tokens of the one before, while those are on their way to the
    scheduler. On a GPU this hides the time that Python takes to describe a step; on a CPU both would share the core.
    What was started for a sequence that ends there is thrown away."""
    device: str = "CPU"
    """For people."""


@dataclass(slots=True)
class _Sequence:
    sampler: MlxSampler
    known: list[int]
    """Tokens to compute."""
    left: int
    """Tokens that may still be drawn."""


class MlxEngine:
    """Implements `Engine`."""

    def __init__(self, model: MlxModel, config: MlxConfig) -> None:
        """On the thread that made the model."""
        self._module = model.module
        self._config = config
        self._gpu = model.device == "gpu"
        self._shares = can_trim_prompt_cache(make_prompt_cache(self._module))
        self._pool = KvPool(config.limits, share=self._shares, copies=True)
        self._sequences: dict[int, _Sequence] = {}
        self._batches = Batches()
        self._retained: dict[int, Caches] = {}
        self._idle_check = IdleCheck(self.check_integrity, self.clear_cache)
        mx.set_cache_limit(_BUFFER_CACHE_BYTES)
        self.info = EngineInfo(
            name="mlx",
            device=config.device,
            simulated=False,
            model_name=model.name,
            model_fingerprint=model.fingerprint,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            precision=model.precision,
            context_tokens=min(config.limits.capacity_tokens, model.train_context_tokens),
            max_step_tokens=MAX_GPU_STEP_TOKENS if self._gpu else MAX_STEP_TOKENS,
            vocabulary=model.vocabulary,
            shares_prefixes=self._shares,
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
        """See `Engine.admit`. The worst case is that of the padded batch: one row more, and all as long as the longest
        may become."""
        placement = self._pool.place(tokens, max_new_tokens, cache_salt)
        if placement is None:
            return None
        handle, reused = placement.handle, placement.reused_tokens
        self._batches.add(handle, self._prefix(placement.source, reused) or make_prompt_cache(self._module))
        self._evict(placement.evicted)
        sampler = MlxSampler(sampling, self.info.vocabulary, ignore_eos=ignore_eos, prompt=tokens, drawn=generated)
        self._sequences[handle] = _Sequence(sampler, list(tokens[reused:]), max_new_tokens)
        return Admission(handle, reused)

    def step(self, slices: Sequence[Slice]) -> StepResult:
        """See `Engine.step`; guesses are never made."""
        chunks: dict[int, list[int]] = {}
        ending: list[int] = []
        for piece in slices:
            known = self._sequences[piece.handle].known
            if piece.tokens == len(known):
                ending.append(piece.handle)
                chunk = known[:-1]
            else:
                chunk = known[: piece.tokens]
            if chunk:
                chunks[piece.handle] = chunk
        try:
            prefilled = self._prefill(chunks)
            drawn = self._decode(ending)
            mx.eval([rows.state for rows in prefilled])
        except (RuntimeError, MemoryError) as error:  # how MLX says that a computation failed
            self._reset()
            raise EngineFailed(
                f"MLX could not compute a step ({error}); the request's work on this backend is lost, send it again."
            ) from error
        for piece in slices:
            sequence = self._sequences[piece.handle]
            self._pool.grow(piece.handle, sequence.known[: piece.tokens])
            sequence.known = sequence.known[piece.tokens :]
            if piece.handle in drawn:
                sequence.known.append(drawn[piece.handle])
                sequence.left -= 1
        return StepResult({handle: [token] for handle, token in drawn.items()})

    def release(self, handle: int, *, retain: bool) -> None:
        """See `Engine.release`."""
        evictions = self._pool.release(handle, retain=retain)
        if length := self._pool.lengths().get(handle):
            self._retained[handle] = self._batches.extract(handle, length)
            # At once: until it is computed, the copy keeps the whole batch in memory.
            mx.async_eval([cache.state for cache in self._retained[handle]])
        self._batches.drop(handle)
        del self._sequences[handle]
        self._evict(evictions)
        if not self._sequences:
            self._idle_check.run()

    def stats(self) -> KvUse:
        """See `Engine.stats`."""
        return self._pool.use()

    def clear_cache(self) -> None:
        """Forget every prefix. Nothing may be running."""
        self._reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books add up and the caches are as long as they say."""
        self._pool.check_integrity()
        lengths = self._pool.lengths()
        assert set(lengths) == {*self._sequences, *self._retained}, "the pool knows other sequences than the engine"
        for handle, caches in self._retained.items():
            assert {cache.offset for cache in caches} == {lengths[handle]}, f"retained {handle} has two lengths"
        assert sorted(self._batches.handles) == sorted(self._sequences), "a live sequence is in no batch, or in two"
        if self._shares:
            for handle, length in self._batches.lengths().items():
                assert length == lengths[handle], f"sequence {handle} has two lengths"

    def _prefix(self, source: int | None, tokens: int) -> Caches | None:
        """Caches with the first tokens of another sequence, retained or live; None where there is nothing to share."""
        if source is None:
            return None
        if source in self._retained:
            return cut(self._retained[source], tokens)
        return self._batches.extract(source, tokens)

    def _prefill(self, chunks: Mapping[int, list[int]]) -> list[Rows]:
        """Compute these tokens, without drawing any: chunks of about the same length in one pass. Lazily."""
        passes = group(chunks, padding_tokens=_GPU_PADDING_TOKENS if self._gpu else _PADDING_TOKENS)
        computed = []
        for handles in passes:
            rows = self._batches.gather(handles)
            rows.prefill(self._module, chunks)
            mx.async_eval(rows.state)
            computed.append(rows)
        return computed

    def _decode(self, handles: Sequence[int]) -> Mapping[int, int]:
        """Compute the last known token of these sequences and draw the next."""
        if not handles:
            return {}
        if fresh := [handle for handle in handles if not self._batches.has_drawn(handle)]:
            rows = self._batches.gather(fresh)
            self._draw(rows, mx.array([self._sequences[handle].known[-1] for handle in rows.handles], mx.int32))
        rows = self._batches.gather(handles)
        drawn, rows.drawn = rows.drawn, None
        assert drawn is not None
        if self._config.run_ahead and any(self._sequences[handle].left > 1 for handle in handles):
            self._draw(rows, drawn)
        tokens: list[int] = drawn.tolist()  # type: ignore[assignment]
        return dict(zip(rows.handles, tokens, strict=True))

    def _draw(self, rows: Rows, tokens: mx.array) -> None:
        logits = rows.decode(self._module, tokens)
        rows.drawn = draw([self._sequences[handle].sampler for handle in rows.handles], logits)
        mx.async_eval(rows.drawn)

    def _evict(self, evictions: Sequence[Eviction]) -> None:
        for eviction in evictions:
            caches = self._retained.pop(eviction.handle, None)
            if caches is not None and eviction.keep_tokens:
                shorter = compact(cut(caches, eviction.keep_tokens))
                mx.async_eval([cache.state for cache in shorter])
                self._retained[eviction.handle] = shorter

    def _reset(self) -> None:
        self._batches.clear()
        self._retained.clear()
        self._sequences.clear()
        self._pool.clear()
