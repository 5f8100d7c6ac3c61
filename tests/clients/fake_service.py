"""A router and backend in one, without a model: it answers as the prompt's text asks it to.

`echo ...` streams the words back; `hang` sends one token and waits to be cancelled; `refuse`, `busy` and `crash` fail;
`flaky` fails twice before its first token; `break` fails after it; `truncated` ends without the last message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from phaseroute.v1 import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc


def fault(code: int, message: str, *details) -> grpc.Status:
    """A status with details, as the services send it."""
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return rpc_status.to_status(status)


class FakeService(inference_pb2_grpc.InferenceServiceServicer, router_pb2_grpc.RouterServiceServicer):
    """Records what arrives, and how it ended."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.ended = threading.Event()
        """The last `hang` is over: cancelled, or its client is gone."""
        self._decisions = threading.Condition()
        self._published: list[router_pb2.WatchDecisionsResponse] = []

    def Generate(self, request, context):
        self.requests.append(request)
        text = request.prompt.text
        match text.split()[0] if text else "echo":
            case "hang":
                context.add_callback(self.ended.set)
                yield _delta("waiting", 1)
                self.ended.wait(30)
            case "refuse":
                violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="is 7")
                context.abort_with_status(
                    fault(
                        code_pb2.INVALID_ARGUMENT,
                        "sampling.top_p: is 7; choose a value in (0, 1]",
                        error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", domain="phaseroute"),
                        error_details_pb2.BadRequest(field_violations=[violation]),
                    )
                )
            case "busy":
                retry = error_details_pb2.RetryInfo()
                retry.retry_delay.FromMilliseconds(1500)
                info = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="phaseroute")
                context.abort_with_status(
                    fault(code_pb2.RESOURCE_EXHAUSTED, "The queue is full; try again in 1.5 s.", info, retry)
                )
            case "crash":
                context.abort(grpc.StatusCode.INTERNAL, "")
            case "flaky" if len(self.requests) < 3:
                context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
            case "break":
                yield _delta("partial", 1)
                context.abort(grpc.StatusCode.UNAVAILABLE, "went away")
            case "truncated":
                yield _delta("partial", 1)
            case _:
                yield from self._answer(request)

    def _answer(self, request) -> Iterator[inference_pb2.GenerateResponse]:
        words = (request.prompt.text or "echo one two three").split()[1:]
        backend = request.routing.backend or "small"
        identity = f"d{len(self.requests)}"
        self._publish(router_pb2.WatchDecisionsResponse(decision=decision(identity, backend)))
        for index, word in enumerate(words):
            yield _delta(word if index == 0 else f" {word}", index + 10)
        yield inference_pb2.GenerateResponse()  # an event kind of the future
        record = inference_pb2.RoutingRecord(
            decision_id=identity, policy="two_phase", backend=backend, attempts=1, predicted_finish_s=3.118,
            actual_ttft_s=0.2, actual_finish_s=2.5,
        )  # fmt: skip
        usage = inference_pb2.Usage(prompt_tokens=516, cached_tokens=496, generated_tokens=len(words))
        outcome = router_pb2.Outcome(decision_id=identity, code="OK", routing=record, usage=usage)
        self._publish(router_pb2.WatchDecisionsResponse(outcome=outcome))
        yield inference_pb2.GenerateResponse(
            finished=inference_pb2.Finished(
                finish_reason=inference_pb2.FINISH_REASON_LENGTH,
                usage=usage,
                timings=inference_pb2.Timings(queue_s=0.1, prefill_s=0.2, decode_s=2.0),
                routing=record,
            )
        )

    def Status(self, request, context):
        return inference_pb2.StatusResponse(status=status())

    def CacheProbe(self, request, context):
        return inference_pb2.CacheProbeResponse(prompt_tokens=516, reusable_tokens=496)

    def Route(self, request, context):
        self.requests.append(request.request)
        return router_pb2.RouteResponse(decision=decision("dry", "small"))

    def ListBackends(self, request, context):
        return router_pb2.ListBackendsResponse(
            backends=[
                router_pb2.BackendEntry(
                    name="fast", target="127.0.0.1:50061", state=router_pb2.BACKEND_STATE_SERVING, status=status()
                ),
                router_pb2.BackendEntry(
                    name="small",
                    target="127.0.0.1:50062",
                    state=router_pb2.BACKEND_STATE_UNREACHABLE,
                    detail="connection refused",
                ),
            ]
        )

    def WatchDecisions(self, request, context):
        context.add_callback(lambda: self._publish(None))
        sent = len(self._published)
        context.send_initial_metadata(())
        while context.is_active():
            with self._decisions:
                while len(self._published) == sent:
                    self._decisions.wait()
                new, sent = self._published[sent:], len(self._published)
            yield from (item for item in new if item is not None)

    def DrainBackend(self, request, context):
        if request.backend != "fast":
            info = error_details_pb2.ErrorInfo(reason="UNKNOWN_NAME", domain="phaseroute")
            context.abort_with_status(fault(code_pb2.NOT_FOUND, "No backend of that name; choose from fast.", info))
        state = router_pb2.BACKEND_STATE_SERVING if request.undo else router_pb2.BACKEND_STATE_DRAINING
        return router_pb2.DrainBackendResponse(backend=router_pb2.BackendEntry(name="fast", state=state))

    def _publish(self, item) -> None:
        with self._decisions:
            self._published.append(item)
            self._decisions.notify_all()


def status() -> inference_pb2.BackendStatus:
    """A backend with one request that decodes and one that waits."""
    return inference_pb2.BackendStatus(
        incarnation="i",
        sequence=7,
        model=inference_pb2.ModelInfo(name="SmolLM2-135M-Instruct", fingerprint="f", context_tokens=4096),
        engine=inference_pb2.EngineInfo(name="simulated", device="given rates", simulated=True),
        max_active=4,
        max_queued=64,
        requests=[
            inference_pb2.RequestStatus(attempt_id="a", phase=inference_pb2.REQUEST_PHASE_DECODE),
            inference_pb2.RequestStatus(attempt_id="b", phase=inference_pb2.REQUEST_PHASE_QUEUED),
        ],
        kv_cache=inference_pb2.KvCacheStatus(capacity_tokens=4096, used_tokens=1024, retained_tokens=512),
        isolated_rates=inference_pb2.IsolatedRates(prefill_tokens_per_s=2551, decode_tokens_per_s=293),
    )


def decision(identity: str, selected: str) -> router_pb2.Decision:
    """The article's request 8, with a third backend that was no candidate."""
    return router_pb2.Decision(
        id=identity,
        policy="two_phase",
        max_new_tokens=128,
        candidates=[
            router_pb2.Candidate(
                backend="fast", active=4, queued=3, prompt_tokens=516, reusable_tokens=496,
                probe=router_pb2.PROBE_OUTCOME_ANSWERED, prefill_tokens=80, decode_tokens=1000, score_s=3.444,
                predicted_ttft_s=1.2,
            ),
            router_pb2.Candidate(
                backend="small", prompt_tokens=516, reusable_tokens=496, probe=router_pb2.PROBE_OUTCOME_ANSWERED,
                prefill_tokens=20, decode_tokens=128, score_s=3.118,
            ),
            router_pb2.Candidate(backend="old", excluded="draining"),
        ],
        selected=selected,
        reason="small has the lowest score: 3.118 s against 3.444 s.",
        probe_s=0.002,
        choose_s=0.0001,
        attempt=1,
    )  # fmt: skip


@contextmanager
def serving(
    service: FakeService,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> Iterator[str]:
    """Serve on a free port; gives the target. No `credentials`: plaintext."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), interceptors=interceptors)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    if credentials:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        service.ended.set()
        server.stop(None).wait()


def _delta(text: str, token: int) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, token_ids=[token]))
