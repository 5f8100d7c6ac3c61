"""One attempt of a request at one backend: the decision behind it, and how it goes."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.decision import Decision
from router_service.failures import RETRYABLE
from router_service.ledger import Lease
from service_kit.errors import UpstreamFailed
from service_kit.faults import Unavailable

CANCELLED = "CANCELLED"

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Attempt:
    """Times on the router's clock."""

    decision: Decision
    lease: Lease | None
    arrived_s: float
    decided_s: float
    first_token_s: float | None = None
    tokens_sent: int = 0
    failure: UpstreamFailed | None = None
    """Before the first token, and worth another attempt elsewhere."""
    code: str = "INTERNAL"
    """A status code's name; a bug of ours when nothing else is said."""
    routing: pb.RoutingRecord | None = None
    ended: pb.Finished | None = None
    """The backend's last message."""

    def note(self, response: pb.GenerateResponse, now_s: float) -> None:
        """A message is about to be passed on; the last one gets the routing record."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.tokens_sent += len(response.delta.token_ids)
        if response.WhichOneof("event") == "finished":
            self._complete(response.finished, self.first_token_s, now_s)

    def fail(self, failure: UpstreamFailed) -> None:
        """The stream broke. Raises what the client is told, if it cannot go elsewhere."""
        if self.routing is not None:
            # The answer was complete.
            self.code = "OK"
            return
        self.code = failure.code.name
        if failure.code not in RETRYABLE:
            raise failure
        if self.first_token_s is not None:
            tokens = "1 token was" if self.tokens_sent == 1 else f"{self.tokens_sent} tokens were"
            raise Unavailable(
                f"Backend {self.decision.selected} broke off after {tokens} sent ({failure}); send the request again "
                "to start over."
            ) from failure
        self.failure = failure
        log.warning(
            "attempt failed",
            decision=self.decision.id,
            backend=self.decision.selected,
            code=self.code,
            problem=str(failure),
        )

    def give_up(self) -> None:
        """The client is gone."""
        self.code = CANCELLED if self.routing is None else "OK"

    def outcome(self) -> router_pb2.Outcome:
        """As watchers of decisions see it."""
        return router_pb2.Outcome(
            decision_id=self.decision.id,
            code=self.code,
            routing=self.routing,
            usage=None if self.ended is None else self.ended.usage,
        )

    def _complete(self, finished: pb.Finished, first_token_s: float, now_s: float) -> None:
        price = self.decision.price
        until_decided_s = self.decided_s - self.arrived_s
        self.routing = pb.RoutingRecord(
            decision_id=self.decision.id,
            policy=self.decision.policy,
            backend=self.decision.selected,
            attempts=self.decision.attempt,
            predicted_ttft_s=None if price.predicted_ttft_s is None else until_decided_s + price.predicted_ttft_s,
            predicted_finish_s=None if price.predicted_finish_s is None else until_decided_s + price.predicted_finish_s,
            actual_ttft_s=first_token_s - self.arrived_s,
            actual_finish_s=now_s - self.arrived_s,
            predicted_new_tokens=self.decision.request.expected_new_tokens if price.own is not None else None,
        )
        self.ended = finished
        finished.routing.CopyFrom(self.routing)
