"""Guesses by a second, smaller model with the same vocabulary, greedily, for all sequences in one batch.

The draft's cache follows the known tokens: what agrees with them stays, wrong guesses are removed before the next ones.
A new sequence is caught up on by a few tokens a step, so that a long prompt does not stall the step, and not guessed
for until then. A draft that cannot help (no room, a context too short, a failed computation) only stops guessing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

from backend_service.engines.llama_batch import LlamaBatch
from backend_service.engines.llama_cpp import MAX_STEP_TOKENS, LlamaConfig
from backend_service.engines.llama_model import LlamaModel, complaint
from service_kit.faults import StartupFailed

CATCH_UP_TOKENS = 64
"""Known tokens computed in one step, over all sequences, beyond those that a step may just have brought."""
_LARGEST_BATCH = MAX_STEP_TOKENS + CATCH_UP_TOKENS
_UBATCH_TOKENS = 128
"""More rows than a step of guesses usually has; working memory grows with it. How it rounds does not matter here."""

_log = logging.getLogger(__name__)


class LlamaDraft:
    """Implements `Proposer`. Sequences share no cells here: each has its own, out of as many as the target has."""

    name = "draft"

    def __init__(self, model: LlamaModel, target: LlamaModel, config: LlamaConfig) -> None:
        """`config`: the target's. Raises `StartupFailed` when the models do not go together or the context does not fit
        the machine."""
        _check_pair(model, target)
        context = llama_cpp.llama_init_from_model(model.pointer, _context_params(config))
        if not context:
            raise StartupFailed(
                f"llama.cpp cannot make a context of {config.limits.capacity_tokens} tokens for the draft model "
                f"({complaint()}); lower --kv-tokens, or leave out --draft-model."
            )
        weakref.finalize(self, _free_context, context, model)
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        self._vocabulary = model.vocabulary
        self._cells = int(llama_cpp.llama_n_ctx(context))
        self._longest = min(self._cells, model.train_context_tokens)
        self._batch = LlamaBatch(_LARGEST_BATCH)
        self._sequences: dict[int, _Sequence] = {}
        self._reserved = 0
        self._complained = False

    def start(self, handle: int, tokens: Sequence[int]) -> None:
        """See `Proposer.start`."""
        self._sequences[handle] = _Sequence(list(tokens))

    def accept(self, handle: int, tokens: Sequence[int]) -> None:
        """See `Proposer.accept`."""
        self._sequences[handle].known += tokens

    def guess(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        """See `Proposer.guess`. What is wanted, and one token more for each sequence, must fit a step of the target."""
        guesses: dict[int, list[int]] = {}
        runs = self._known_runs(wanted)
        while runs:
            following = self._compute(runs)
            for handle, token in following.items():
                guesses.setdefault(handle, []).append(token)
            runs = {
                handle: [token]
                for handle, token in following.items()
                if len(guesses[handle]) < wanted[handle] and token not in self._vocabulary.eos
            }
        return guesses

    def forget(self, handle: int) -> None:
        """See `Proposer.forget`."""
        self._give_up_cells(handle)
        del self._sequences[handle]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books add up and llama.cpp's own positions agree with them."""
        assert self._reserved == sum(sequence.reserved for sequence in self._sequences.values()), "cells are lost"
        assert self._reserved <= self._cells, "more cells promised than there are"
        for handle, sequence in self._sequences.items():
            length = sequence.agreed + len(sequence.ahead)
            assert length <= sequence.reserved, f"sequence {handle} has more cells than are reserved for it"
            end = llama_cpp.llama_memory_seq_pos_max(self._memory, handle) + 1
            assert end == length, f"draft sequence {handle} has {end} cells in llama.cpp and {length} in the books"

    def _known_runs(self, wanted: Mapping[int, int]) -> dict[int, Sequence[int]]:
        """What to compute first: known tokens, of each sequence as many as a step may have brought, and of those that
        are further behind as many more as `CATCH_UP_TOKENS` allows."""
        runs: dict[int, Sequence[int]] = {}
        spare = CATCH_UP_TOKENS
        for handle, count in wanted.items():
            sequence = self._sequences[handle]
            if count < 1 or sequence.lost:
                continue
            self._drop_wrong_guesses(handle, sequence)
            if not self._reserve(handle, sequence, len(sequence.known) + count):
                continue
            missing = len(sequence.known) - sequence.agreed
            share = min(missing, count + 1 + spare)
            spare -= max(0, share - (count + 1))
            runs[handle] = sequence.known[sequence.agreed : sequence.agreed + share]
        return runs

    def _compute(self, runs: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Compute these tokens; the likeliest next one of each sequence that is computed to its end then. Empty, and
        the sequences lost, when llama.cpp fails."""
        self._batch.clear()
        asked = []
        for handle, run in runs.items():
            sequence = self._sequences[handle]
            place = sequence.agreed + len(sequence.ahead)
            ends = place + len(run) >= len(sequence.known)
            self._batch.add(handle, run, place, outputs=int(ends))
            if ends:
                asked.append(handle)
        if code := llama_cpp.llama_decode(self._context, self._batch.struct):
            self._lose(runs, code)
            return {}
        for handle, run in runs.items():
            self._sequences[handle].computed(run)
        if not asked:
            return {}
        pointer = llama_cpp.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, (len(asked), self._vocabulary.size))
        return dict(zip(asked, logits.argmax(axis=1).tolist(), strict=True))

    def _drop_wrong_guesses(self, handle: int, sequence: _Sequence) -> None:
        """Keep what agrees with the known tokens, but for the last one: it is computed anew for what follows it."""
        cached = sequence.agreed + len(sequence.ahead)
        for token, known in zip(sequence.ahead, sequence.known[sequence.agreed :], strict=False):
            if token != known:
                break
            sequence.agreed += 1
        sequence.agreed = min(sequence.agreed, len(sequence.known) - 1)
        sequence.ahead = []
        if sequence.agreed < cached:
            llama_cpp.llama_memory_seq_rm(self._memory, handle, sequence.agreed, -1)

    def _reserve(self, handle: int, sequence: _Sequence, cells: int) -> bool:
        """Set cells aside for a sequence; where they are not there, it gives up those that it has."""
        if cells > self._longest or self._reserved - sequence.reserved + cells > self._cells:
            self._give_up_cells(handle)
            return False
        self._reserved += cells - sequence.reserved
        sequence.reserved = cells
        return True

    def _give_up_cells(self, handle: int) -> None:
        sequence = self._sequences[handle]
        llama_cpp.llama_memory_seq_rm(self._memory, handle, -1, -1)
        self._reserved -= sequence.reserved
        sequence.agreed = sequence.reserved = 0
        sequence.ahead = []

    def _lose(self, handles: Mapping[int, object], code: int) -> None:
        reason = complaint()
        if not self._complained:
            self._complained = True
            _log.warning(
                "the draft model could not compute a step (code %d: %s): no more guesses for the requests in it; "
                "answers are not affected. This is said once.",
                code,
                reason,
            )
        for handle in handles:
            self._give_up_cells(handle)
            self._sequences[handle].lost = True


@dataclass(slots=True)
class _Sequence:
    """What is known of a sequence, and how much of it the draft's cache holds."""

    known: list[int]
    agreed: int = 0
    """Leading known tokens in the cache."""
    ahead: list[int] = field(default_factory=list)
    """Guesses in the cache after all that was known when they were made."""
    reserved: int = 0
    """Cells set aside: what is in the cache and what the step in progress may add."""
    lost: bool = False
    """A computation failed: it is guessed for no more."""

    def computed(self, run: Sequence[int]) -> None:
        """These tokens are in the cache now: known ones, or a guess after them."""
        if self.agreed < len(self.known):
            self.agreed += len(run)
        else:
            self.ahead += run


def _check_pair(model: LlamaModel, target: LlamaModel) -> None:
    draft, wanted = model.vocabulary.pieces, target.vocabulary.pieces
    if len(draft) != len(wanted):
        raise StartupFailed(
            f"The draft model {model.name} has a vocabulary of {len(draft)} tokens and {target.name} one of "
            f"{len(wanted)}; a draft model must have the same one: choose a smaller model of the same family."
        )
    for token, (piece, other) in enumerate(zip(draft, wanted, strict=True)):
        if piece != other:
            raise StartupFailed(
                f"Token {token} is {piece!r} to the draft model {model.name} and {other!r} to {target.name}; a draft "
                "model must have the same vocabulary: choose a smaller model of the same family."
            )
    if not model.shares_prefixes:
        raise StartupFailed(
            f"The draft model {model.name} keeps a state that cannot be cut back to a prefix (recurrent, hybrid, or "
            "with a sliding window), so its wrong guesses could not be taken back; choose another one."
        )


def _context_params(config: LlamaConfig) -> llama_cpp.llama_context_params:
    params: llama_cpp.llama_context_params = llama_cpp.llama_context_default_params()
    params.n_ctx = config.limits.capacity_tokens
    params.n_batch = _LARGEST_BATCH
    params.n_ubatch = _UBATCH_TOKENS
    params.n_seq_max = config.limits.handles
    params.kv_unified = True
    params.n_threads = params.n_threads_batch = config.threads
    if not config.flash_attention:
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return params


def _free_context(context: llama_cpp.llama_context_p, _model: LlamaModel) -> None:
    """The model argument keeps the weights alive until the context that uses them is gone."""
    llama_cpp.llama_free(context)
