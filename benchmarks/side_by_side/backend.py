"""Our side: `python -m backend_service`, over gRPC."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.side_by_side.answer import Chunk, Usage
from benchmarks.side_by_side.load import Running
from benchmarks.side_by_side.process import started
from benchmarks.side_by_side.workload import SLOTS, Ask
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel

_DEADLINE_S = 600.0


class Backend:
    """A backend that serves."""

    def __init__(self, stub: pb_grpc.InferenceServiceStub) -> None:
        self._stub = stub

    async def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """See `Server.stream`."""
        request = pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ask.prompt)), max_new_tokens=ask.new_tokens, ignore_eos=True
        )
        call = self._stub.Generate(request, timeout=_DEADLINE_S)
        try:
            async for message in call:
                if message.HasField("delta"):
                    yield Chunk(tuple(message.delta.token_ids))
                else:
                    usage = message.finished.usage
                    yield Chunk(usage=Usage(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens))
        finally:
            call.cancel()


@asynccontextmanager
async def backend(
    model: Path, *, kv_tokens: int, core: int, profiles: Path, flags: Sequence[str]
) -> AsyncIterator[Running]:
    """A backend with one thread, the whole process on one core; `flags` are its own and may override. Raises
    `SetUpFailed`."""
    command = [sys.executable, "-m", "backend_service", "--listen", "127.0.0.1:0", "--log-format", "json"]
    command += ["--model", str(model), "--threads", "1", "--max-active", str(SLOTS), "--kv-tokens", str(kv_tokens)]
    command += ["--profile-dir", str(profiles), *flags]
    async with (
        started(command, core, lambda line: '"serving"' in line) as process,
        open_channel(json.loads(process.ready_line)["address"]) as channel,
    ):
        yield Running(Backend(pb_grpc.InferenceServiceStub(channel)), process, {})  # type: ignore[no-untyped-call]
