"""Where a policy sends one more request, by what waits and by what is cached: a map to look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverMap:
    """One policy's choices over a grid. `busy` has the backlog and the cached prefix; the others are idle and cold."""

    policy: str
    backends: tuple[str, ...]
    busy: str
    prompt_tokens: int
    new_tokens: int
    backlog: tuple[int, ...]
    """Requests on `busy`, by row."""
    cached_tokens: tuple[int, ...]
    """Of this request's prompt on `busy`, by column."""
    choice: tuple[tuple[int, ...], ...]
    """Index into `backends`, by row and column."""
    note: str = ""
    """What differs from another map of the same policy, such as how output lengths are estimated."""
