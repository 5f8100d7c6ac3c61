"""One Generate call to a backend: what goes there, what comes back, and every way in which it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import grpc

from phaseroute.v1 import inference_pb2 as pb
from router_service.decision import Decision, ProbeOutcome
from router_service.ledger import Lease
from service_kit.errors import UpstreamFailed, from_rpc_error, internal_status, to_status
from service_kit.faults import Unavailable
from service_kit.identity import Caller
from service_kit.requests import GenerateSpec


def forwarded(
    wire: pb.GenerateRequest,
    spec: GenerateSpec,
    *,
    caller: Caller,
    generated: Sequence[int],
    decision: Decision,
    lease: Lease,
) -> pb.GenerateRequest:
    """A request as the backend gets it; `generated` is what the client has of its answer. Hints were for this router
    and name its backends; a demanded precision is for every router on the way."""
    request = pb.GenerateRequest()
    request.CopyFrom(wire)
    request.ClearField("routing")
    if spec.routing.precision:
        request.routing.precision = spec.routing.precision
    request.max_new_tokens = spec.max_new_tokens
    request.attempt.Clear()
    request.attempt.id = lease.attempt_id
    request.attempt.generated_token_ids.extend(generated)
    request.attempt.client = caller.client(spec.client)
    request.attempt.client_weight = caller.share(spec.client_weight)
    request.attempt.cache_salt = caller.salt(spec.cache_salt)
    chosen = next(candidate for candidate in decision.candidates if candidate.name == lease.backend)
    if chosen.probe is ProbeOutcome.ANSWERED:
        # Without an answer the backend looks for itself.
        request.attempt.reusable_tokens = lease.reusable_tokens
    return request


async def messages(
    generate: Callable[..., Any],
    request: pb.GenerateRequest,
    until_lost: Callable[[], Awaitable[str]],
    *,
    timeout_s: float | None,
    metadata: Sequence[tuple[str, str]],
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """What a backend sends, until it is lost: a stopped process and a cut network end no stream by themselves.

    `generate`: its stub's method. However the call breaks, that is an `UpstreamFailed`, unless the task itself is
    cancelled; the call never outlives this.
    """
    try:
        call = generate(request, timeout=timeout_s, metadata=metadata)
    except grpc.aio.UsageError as error:
        raise broken("The router's channel to the backend is closed.") from error
    lost = asyncio.ensure_future(until_lost())
    lost.add_done_callback(lambda _: call.cancel())
    try:
        async for response in call:
            if response is None:
                raise UpstreamFailed(
                    internal_status("The backend sent a message that cannot be read; check that its version matches.")
                )
            yield response
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            # That is about the router's token, and nothing that its client could mend.
            raise broken("The backend does not let this router in; its operator finds more in both logs.") from error
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Not the client: the call itself was cancelled, by `lost` or by whoever closed its channel.
        if lost.done() and not lost.cancelled():
            raise broken(lost.result()) from None
        raise broken("The router's own call to the backend was cut off.") from None
    finally:
        lost.cancel()
        call.cancel()


def broken(problem: str) -> UpstreamFailed:
    """A failure that no status of the backend tells of."""
    return UpstreamFailed(to_status(Unavailable(problem)))
