"""A scriptable InferenceService, and a router in this process to put before some of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2_grpc
from router_service.backend import State
from router_service.host import host
from router_service.router import Router
from router_service.settings import RouterSettings
from service_kit.channels import open_channel
from service_kit.serve import Server
from service_kit.telemetry import Telemetry

FAST = (2551.0, 293.0)
SLOW = (73.0, 45.0)
"""Prefill and decode tokens/s of the article's two devices."""

Script = Callable[["StubBackend", pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


def delta(*token_ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text="x" * len(token_ids), token_ids=token_ids))


def last() -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=7, generated_tokens=3))
    )


def answers(*token_ids: int) -> Script:
    """One message a token, then the last message."""

    async def script(stub, request, context):
        for token_id in token_ids:
            yield delta(token_id)
        yield last()

    return script


def fails(code: grpc.StatusCode, message: str = "scripted", after: int = 0) -> Script:
    """Aborts after so many tokens."""

    async def script(stub, request, context):
        for token_id in range(after):
            yield delta(token_id)
        await context.abort(code, message)

    return script


def hangs(after: int = 0) -> Script:
    """Sends so many tokens, then waits for `release` or to be cancelled."""

    async def script(stub, request, context):
        for token_id in range(after):
            yield delta(token_id)
        stub.hanging += 1
        stub.changed()
        await stub.release.wait()
        yield delta(99)
        yield last()

    return script


class StubBackend(pb_grpc.InferenceServiceServicer):
    """Records what arrives and how it ended; does as it is told."""

    def __init__(
        self,
        rates: tuple[float, float] | None = FAST,
        *,
        model: str = "m",
        context_tokens: int = 4096,
        max_active: int = 4,
        tokenizer: str = "t",
        precision: str = "q4_1",
    ) -> None:
        self.target = ""
        self.status = pb.BackendStatus(
            incarnation="first",
            sequence=1,
            model=pb.ModelInfo(
                name=model,
                fingerprint="f",
                context_tokens=context_tokens,
                tokenizer_fingerprint=tokenizer,
                precision=precision,
            ),
            engine=pb.EngineInfo(name="stub", device="none"),
            max_active=max_active,
            max_queued=8,
        )
        if rates is not None:
            self.status.isolated_rates.prefill_tokens_per_s, self.status.isolated_rates.decode_tokens_per_s = rates
        self.generate: Script = answers(1, 2, 3)
        self.probe: Callable[[pb.CacheProbeRequest, grpc.aio.ServicerContext], Awaitable[tuple[int, int]]]
        self.probe = self.tells(100, 0)
        self.watches = True
        """Whether WatchStatus exists."""
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.time_left_s: list[float | None] = []
        self.probes = 0
        self.hanging = 0
        self.running = 0
        self.cancelled = 0
        self.release = asyncio.Event()
        self._news = asyncio.Condition()
        self._version = 0
        self._watch_era = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @staticmethod
    def tells(prompt_tokens: int, reusable_tokens: int):
        """A prompt CacheProbe."""

        async def probe(request, context):
            return prompt_tokens, reusable_tokens

        return probe

    @staticmethod
    def probe_fails(code: grpc.StatusCode, message: str = "scripted"):
        """A CacheProbe that aborts."""

        async def probe(request, context):
            await context.abort(code, message)

        return probe

    def changed(self) -> None:
        """Wake whoever waits for this stub."""
        task = asyncio.ensure_future(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def wait(self, condition: Callable[[StubBackend], bool]) -> None:
        """Until the condition holds; the test's own time limit ends it."""
        async with self._news:
            await self._news.wait_for(lambda: condition(self))

    def push(self, **changes) -> None:
        """Send a new Status to whoever watches; keywords are its fields, `sequence` goes up unless given."""
        changes.setdefault("sequence", self.status.sequence + 1)
        requests = changes.pop("requests", None)
        for name, value in changes.items():
            setattr(self.status, name, value)
        if requests is not None:
            del self.status.requests[:]
            self.status.requests.extend(requests)
        self._version += 1
        self.changed()

    def end_watches(self) -> None:
        """End the streams of Status that are open now."""
        self._watch_era += 1
        self.push()

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append({key: value for key, value in context.invocation_metadata() if isinstance(value, str)})
        self.time_left_s.append(context.time_remaining())
        self.running += 1
        complete = False
        try:
            async for response in self.generate(self, request, context):
                yield response
            complete = True
        except grpc.aio.AbortError:
            complete = True
            raise
        finally:
            self.running -= 1
            self.cancelled += not complete
            self.changed()

    async def Status(self, request, context):
        self.changed()
        return pb.StatusResponse(status=self.status)

    async def WatchStatus(self, request, context):
        if not self.watches:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        era = self._watch_era
        while era == self._watch_era:
            sent = self._version
            yield pb.WatchStatusResponse(status=self.status)
            await self.wait(lambda stub, sent=sent: stub._version != sent)

    async def CacheProbe(self, request, context):
        self.probes += 1
        prompt_tokens, reusable_tokens = await self.probe(request, context)
        return pb.CacheProbeResponse(prompt_tokens=prompt_tokens, reusable_tokens=reusable_tokens)

    @asynccontextmanager
    async def serving(self, address: str = "127.0.0.1:0") -> AsyncIterator[StubBackend]:
        """On the network while the block lasts."""
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_InferenceServiceServicer_to_server(self, self.server)
        self.target = f"127.0.0.1:{self.server.add_insecure_port(address)}"
        await self.server.start()
        try:
            yield self
        finally:
            await self.server.stop(None)


@dataclass
class RouterUnderTest:
    """A served router, its inside, and clients of it."""

    server: Server
    router: Router
    channel: grpc.aio.Channel
    inference: pb_grpc.InferenceServiceStub = field(init=False)
    admin: router_pb2_grpc.RouterServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.inference = pb_grpc.InferenceServiceStub(self.channel)
        self.admin = router_pb2_grpc.RouterServiceStub(self.channel)

    async def wait(self, condition: Callable[[Router], bool]) -> None:
        """Until the fleet or its bookings make the condition true; the test's own time limit ends it."""
        with self.router.fleet.changes.subscribe() as changes:
            while not condition(self.router):
                await changes.get()

    async def wait_state(self, name: str, state: State) -> None:
        await self.wait(lambda router: router.fleet.backends[name].state is state)

    async def generate(self, **options) -> list[pb.GenerateResponse]:
        """A whole answer."""
        return [response async for response in self.inference.Generate(request(**options))]


def request(text: str = "hello", max_new_tokens: int = 16, **fields) -> pb.GenerateRequest:
    fields.setdefault("prompt", pb.Prompt(text=text))
    return pb.GenerateRequest(max_new_tokens=max_new_tokens, **fields)


@asynccontextmanager
async def router(
    backends: Mapping[str, StubBackend | str], *, ready: bool = True, telemetry: Telemetry | None = None, **settings
) -> AsyncIterator[RouterUnderTest]:
    """Stubs are put on the network, strings are taken as targets. `ready`: wait until all of them serve."""
    # Far above what a test needs, so that a busy machine makes no probe late unless the test is about that.
    settings.setdefault("probe_timeout_s", 5.0)
    settings.setdefault("keep_lengths", False)  # no test learns from another
    settings.setdefault("continue_wait_s", 0.0)  # where nobody is left, that is so at once
    async with AsyncExitStack() as stack:
        for backend in backends.values():
            if isinstance(backend, StubBackend) and not backend.target:
                await stack.enter_async_context(backend.serving())
        targets = [f"{name}={b if isinstance(b, str) else b.target}" for name, b in backends.items()]
        chosen = RouterSettings(backend=targets, listen="127.0.0.1:0", **settings)
        hosted = await stack.enter_async_context(host(chosen, telemetry))
        channel = await stack.enter_async_context(open_channel(hosted.server.target))
        under_test = RouterUnderTest(hosted.server, hosted.router, channel)
        if ready:
            for name in backends:
                await under_test.wait_state(name, State.SERVING)
        yield under_test
