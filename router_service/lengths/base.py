"""What is asked of output lengths, and what they are learnt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LengthQuery:
    """A request of which the answer, or the rest of it, is to come."""

    workload: str
    """The client's label; empty without one."""
    prompt_tokens: int
    max_new_tokens: int
    generated_tokens: int = 0
    """Made so far; the answer has not ended with them."""
    ignore_eos: bool = False
    """It goes on to max_new_tokens."""

    @property
    def budget_tokens(self) -> int:
        """What max_new_tokens leaves; 1 at least, since a request that is asked for makes another token."""
        return max(1, self.max_new_tokens - self.generated_tokens)


@dataclass(frozen=True, slots=True)
class LengthOutcome:
    """How long an answer became that was free to end before max_new_tokens."""

    workload: str
    prompt_tokens: int
    max_new_tokens: int
    generated_tokens: int
    ended: bool
    """By the model or a stop string. Otherwise max_new_tokens cut it off: it would have become longer (a censored
    observation)."""

    @property
    def length_tokens(self) -> int:
        """generated_tokens where it makes sense: 1 at least, max_new_tokens at most. Backends report it."""
        return max(1, min(self.generated_tokens, self.max_new_tokens))


class LengthEstimator(Protocol):
    """Says how many new tokens a request will still make."""

    @property
    def name(self) -> str:
        """As in `LENGTH_POLICIES`."""
        ...

    @property
    def version(self) -> int:
        """Grows whenever an answer of `expected` may have changed, so that callers can keep answers until then."""
        ...

    def expected(self, query: LengthQuery) -> float:
        """Tokens still to come: between 1 and what max_new_tokens leaves, exactly that with ignore_eos."""
        ...

    def observe(self, outcome: LengthOutcome) -> None:
        """Learn from an answer. Those with ignore_eos teach nothing: leave them out."""
        ...

    def state(self) -> dict[str, Any]:
        """All that it has learnt, as JSON takes it and of bounded size; empty while that is nothing."""
        ...

    def restore(self, state: object) -> bool:
        """Know what `state` of an estimator of the same name told, and nothing else: estimates are then what they were
        there. False for whatever is not such a state; then nothing has changed."""
        ...
