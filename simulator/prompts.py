"""Token ids for requests that exist only as numbers, and the way back from a prompt to its request."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from backend_service.prefix_index import PACKED
from phaseroute.scenarios.planned import Planned, Scenario

_OWN = 1 << 31
"""From here on up: token ids of a request's own. Below: those of shared prefixes."""


def prefix_tokens(number: int, tokens: int) -> array[int]:
    """The first tokens of a shared prefix: its number, over and over."""
    return array(PACKED, [number]) * tokens


def prompt_tokens(index: int, planned: Planned) -> array[int]:
    """The prompt of the scenario's request at `index`: what it shares, then its own id, over and over."""
    shared = planned.prefix_tokens if planned.prefix >= 0 else 0
    return prefix_tokens(max(0, planned.prefix), shared) + array(PACKED, [_OWN + index]) * (
        planned.prompt_tokens - shared
    )


def answer_lengths(requests: Sequence[Planned]) -> Callable[[Sequence[int]], int | None]:
    """From a prompt to the length of its answer: what a simulated engine asks for. None for any other prompt."""

    def length(prompt: Sequence[int]) -> int | None:
        index = prompt[-1] - _OWN
        return requests[index].new_tokens if 0 <= index < len(requests) else None

    return length


def longest_uses(scenario: Scenario) -> dict[int, int]:
    """Tokens of each warm prefix: as many as the request that uses most of it."""
    longest = dict.fromkeys(scenario.warm, 0)
    for planned in scenario.requests:
        if planned.prefix in longest:
            longest[planned.prefix] = max(longest[planned.prefix], planned.prefix_tokens)
    return {number: tokens for number, tokens in longest.items() if tokens}
