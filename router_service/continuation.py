"""One request's answer over all attempts: what the client has of it, and whether it may go on elsewhere.

A sampled answer without a seed goes on too: its next tokens are drawn anew, as likely as those that were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

import grpc

from router_service.failures import FAILURE_ROOM, Failures
from service_kit.errors import UpstreamFailed
from service_kit.faults import Unavailable

WHY_ROOM = 180
"""Characters of a reason in a sentence, as `FAILURE_ROOM`."""

_BROKEN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
"""The backend's own trouble, whenever it comes."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What is done at most to bring one request to its end."""

    max_attempts: int = 4
    """Backends that may break it; those that have no room for it do not count."""
    max_replayed_tokens: int = 8192
    """An answer of more tokens is not computed again elsewhere."""
    max_wait_s: float = 10.0
    """An answer that has begun waits so long for a backend to go on with it where there is none."""


class Answer:
    """What came so far, whichever backends it came from."""

    def __init__(self, inherited: Sequence[int], arrived_s: float) -> None:
        """`inherited`: what a router before this one had of it already. Times on this router's clock."""
        self.arrived_s = arrived_s
        self.token_ids = list(inherited)
        """All of it, in order."""
        self.first_token_s: float | None = None
        """When the client was sent its first message from here; None before."""
        self.continuations = 0
        """How often it went on elsewhere."""
        self.traceable = True
        """`token_ids` stand for all the text that was sent."""

    @property
    def begun(self) -> bool:
        """Something was sent: from now on there is no starting over."""
        return self.first_token_s is not None

    def begin(self, now_s: float) -> None:
        """An attempt is about to send its first message: the answer begins, or goes on elsewhere."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.continuations += 1


def worth_another(failure: UpstreamFailed, *, here: bool, anywhere: bool) -> bool:
    """Whether another backend may do better than the one that failed. `here`: it sent something of the answer;
    `anywhere`: the client has something of it."""
    if failure.code in _BROKEN:
        return True
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return False
    if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # No room for the request, or, later, for what its client does not read: that one would be as slow elsewhere.
        return not here
    # The request's own fault, unless a backend took it before.
    return anywhere and not here


def why_not(answer: Answer, failures: Failures, limits: RelayLimits) -> str:
    """Why a request that failed is not decided again; empty when it is."""
    if failures.broken >= limits.max_attempts:
        return f"this router gives up after {limits.max_attempts} failed attempts"
    if answer.begun and not answer.traceable:
        return "the backend sent text without its token ids"
    if answer.begun and len(answer.token_ids) > limits.max_replayed_tokens:
        return f"an answer of more than {limits.max_replayed_tokens} tokens is not computed again"
    return ""


class BrokenOff(Unavailable):
    """The client has a part of the answer and will not get the rest."""

    def __init__(self, answer: Answer, failures: Failures, why: str) -> None:
        """`failures`: one at least; `why`: the answer does not go on elsewhere, without a full stop."""
        backend, failure = failures.last
        count = len(answer.token_ids)
        tokens = "1 token was" if count == 1 else f"{count} tokens were"
        super().__init__(
            f"Backend {backend} broke off after {tokens} sent "
            f"({shorten(str(failure), FAILURE_ROOM, placeholder='…').rstrip('.')}), and the answer cannot go on "
            f"elsewhere: {shorten(why, WHY_ROOM, placeholder='…')}; send the request again to start over."
        )
        self.metadata = failures.metadata(generated_tokens=count)
