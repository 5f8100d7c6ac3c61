"""One attempt of a request at one backend: the decision behind it, and how it goes."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2
from router_service.continuation import Answer
from router_service.decision import Decision
from router_service.ledger import Lease
from service_kit.errors import UpstreamFailed

CANCELLED = "CANCELLED"

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Attempt:
    """Times on the router's clock."""

    decision: Decision
    lease: Lease | None
    answer: Answer
    """The request's, to which this attempt adds."""
    decided_s: float
    begun: bool = False
    """It sent something of the answer."""
    failure: UpstreamFailed | None = None
    """Why it did not bring the answer to its end, where that is the backend's doing."""
    code: str = "INTERNAL"
    """A status code's name; a bug of ours when nothing else is said."""
    routing: pb.RoutingRecord | None = None
    ended: pb.Finished | None = None
    """The backend's last message."""

    def note(self, response: pb.GenerateResponse, now_s: float) -> None:
        """A message is about to be passed on; the last one gets the routing record."""
        if not self.begun:
            self.begun = True
            self.answer.begin(now_s)
        if token_ids := response.delta.token_ids:
            self.answer.token_ids.extend(token_ids)
        elif response.HasField("finished"):
            self._complete(response.finished, now_s)

    def fail(self, failure: UpstreamFailed) -> None:
        """The stream broke."""
        if self.routing is not None:
            # The answer was complete.
            self.code = "OK"
            return
        self.code = failure.code.name
        self.failure = failure
        log.warning(
            "attempt failed",
            decision=self.decision.id,
            backend=self.decision.selected,
            code=self.code,
            problem=str(failure),
            generated_tokens=len(self.answer.token_ids),
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

    def _complete(self, finished: pb.Finished, now_s: float) -> None:
        price = self.decision.price
        arrived_s = self.answer.arrived_s
        first_token_s = now_s if self.answer.first_token_s is None else self.answer.first_token_s
        until_decided_s = self.decided_s - arrived_s
        self.routing = pb.RoutingRecord(
            decision_id=self.decision.id,
            policy=self.decision.policy,
            backend=self.decision.selected,
            attempts=self.decision.attempt,
            predicted_ttft_s=None if price.predicted_ttft_s is None else until_decided_s + price.predicted_ttft_s,
            predicted_finish_s=None if price.predicted_finish_s is None else until_decided_s + price.predicted_finish_s,
            actual_ttft_s=first_token_s - arrived_s,
            actual_finish_s=now_s - arrived_s,
            predicted_new_tokens=self.decision.request.expected_new_tokens if price.own is not None else None,
            continuations=self.answer.continuations,
        )
        self.ended = finished
        finished.routing.CopyFrom(self.routing)
