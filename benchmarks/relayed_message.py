"""What a relayed message costs the router in CPU.

    python -m benchmarks.relayed_message [--rounds 5] [--streams 16] [--messages 1000] [--tree OTHER ...]

Scope: relaying, with its share of deciding: a call's own cost is spread over its messages. Set-up: a stub backend that
sends one token a message as fast as it is read, the router, and the client (this program) are a process each. Measured
is the CPU of the router's process, gRPC's threads included, over all messages that it relayed. Each `--tree` is
another checkout whose router is measured in turns with this one's, to compare two versions under the same weather.
Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from rich.console import Console
from rich.table import Table

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel

HERE = Path(__file__).resolve().parent.parent


class Stub(pb_grpc.InferenceServiceServicer):
    """As many tokens as are asked for, at once."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """One token a message."""
        for index in range(request.max_new_tokens):
            yield pb.GenerateResponse(delta=pb.Delta(text=" word", token_ids=[index]))
        yield pb.GenerateResponse(
            finished=pb.Finished(
                finish_reason=pb.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=10, generated_tokens=request.max_new_tokens),
            )
        )

    async def CacheProbe(self, request: pb.CacheProbeRequest, context: Any) -> pb.CacheProbeResponse:
        """Nothing is there."""
        return pb.CacheProbeResponse(prompt_tokens=10)

    async def WatchStatus(self, request: pb.WatchStatusRequest, context: Any) -> AsyncIterator[pb.WatchStatusResponse]:
        """Heartbeats."""
        status = pb.BackendStatus(
            incarnation="i",
            model=pb.ModelInfo(name="m", fingerprint="f", context_tokens=1 << 20),
            max_active=1024,
            isolated_rates=pb.IsolatedRates(prefill_tokens_per_s=1e5, decode_tokens_per_s=1e4),
        )
        while True:
            status.sequence += 1
            yield pb.WatchStatusResponse(status=status)
            await asyncio.sleep(0.5)


async def serve_stub() -> None:
    """The backend's process: prints its target, then serves until stdin closes."""
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(Stub(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


@asynccontextmanager
async def backend() -> AsyncIterator[str]:
    """A stub backend's target."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--stub", stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def router(tree: Path, target: str) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A checkout's router before a backend: its process and target."""
    flags = ("--backend", f"stub={target}", "--listen", "127.0.0.1:0", "--log-format", "json")
    paths = os.pathsep.join(str(tree / each) for each in ("", "protos", "clients/python"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router_service", *flags, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, stderr=PIPE
    )
    assert process.stderr is not None
    try:
        address = ""
        while True:
            line = json.loads(await process.stderr.readline() or "null")
            if line is None:
                raise RuntimeError(f"the router of {tree} did not start; start it by hand to see why")
            address = line.get("address", address)
            if line["event"] == "backend" and line["state"] == "serving":
                break
        reading = asyncio.ensure_future(_read_away(process.stderr))
        yield psutil.Process(process.pid), address
        reading.cancel()
    finally:
        process.terminate()
        await process.wait()


async def _read_away(log: asyncio.StreamReader) -> None:
    while await log.read(65_536):
        pass


async def measure(tree: Path, target: str, streams: int, messages: int) -> float:
    """Microseconds of CPU a message."""
    async with router(tree, target) as (process, address), open_channel(address) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        await _load(stub, streams, 50)
        before = process.cpu_times()
        await _load(stub, streams, messages)
        after = process.cpu_times()
    spent_s = after.user + after.system - before.user - before.system
    return 1e6 * spent_s / (streams * messages)


async def _load(stub: pb_grpc.InferenceServiceStub, streams: int, messages: int) -> None:
    async def stream() -> None:
        request = pb.GenerateRequest(prompt=pb.Prompt(text="hello"), max_new_tokens=messages, ignore_eos=True)
        received = 0
        async for response in stub.Generate(request, wait_for_ready=True):
            received += len(response.delta.token_ids)
        assert received == messages

    await asyncio.gather(*(stream() for _ in range(streams)))


async def compare(trees: list[Path], options: argparse.Namespace) -> dict[Path, list[float]]:
    """Figures by tree, one a round."""
    figures: dict[Path, list[float]] = {tree: [] for tree in trees}
    async with backend() as target:
        for round_ in range(options.rounds):
            for tree in trees if round_ % 2 else trees[::-1]:
                figures[tree].append(await measure(tree, target, options.streams, options.messages))
    return figures


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--messages", type=int, default=1000, help="of each stream")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout to compare with")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(serve_stub())
        return 0
    figures = asyncio.run(compare([HERE, *(tree.resolve() for tree in options.tree)], options))
    table = Table(title=f"Router CPU of one relayed message, µs ({options.rounds} rounds, {options.streams} streams)")
    for label in ("tree", "median", "least", "most"):
        table.add_column(label, justify="left" if label == "tree" else "right")
    for tree, values in figures.items():
        table.add_row(tree.name, *(f"{each:.1f}" for each in (statistics.median(values), min(values), max(values))))
    Console().print(table)
    print(
        json.dumps(
            {
                "benchmark": "relayed_message",
                "python": platform.python_version(),
                "rounds": options.rounds,
                "streams": options.streams,
                "messages": options.messages,
                "cpu_us": {tree.name: [round(each, 1) for each in values] for tree, values in figures.items()},
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
