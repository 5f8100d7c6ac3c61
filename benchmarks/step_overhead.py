"""What a step costs beside llama.cpp's own work: the engine thread's time between two llama_decode calls.

    python -m benchmarks.step_overhead [--streams 1 4] [--tokens 100] [--core 0] [--client-core 1]

A whole backend (gRPC, event loop, engine thread) pinned to one core; the client is a process of its own on another.
Only pure decode steps are counted: sampling, books, texts, snapshot and hand-over to the event loop, and whatever the
event loop itself takes from the core. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import llama_cpp
from rich.console import Console
from rich.table import Table

from backend_service.host import host
from backend_service.settings import BackendSettings
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel

PROMPT_TOKENS = 64
WARM_UP_STEPS = 5


class Stopwatch:
    """Stands in for llama_decode and notes when each call began and ended, and how many rows it had."""

    def __init__(self) -> None:
        self._decode = llama_cpp.llama_decode
        self.calls: list[tuple[int, float, float]] = []

    def __call__(self, context: Any, batch: Any) -> int:
        """The real thing, timed."""
        begun_s = time.perf_counter()
        code: int = self._decode(context, batch)
        self.calls.append((batch.n_tokens, begun_s, time.perf_counter()))
        return code


def shares(calls: list[tuple[int, float, float]], rows: int) -> dict[str, float]:
    """Medians over the steps with `rows` rows whose successor has as many: period and time outside llama_decode."""
    steps = [
        (after[1] - before[1], after[1] - before[2])
        for before, after in itertools.pairwise(calls)
        if before[0] == after[0] == rows
    ][WARM_UP_STEPS:]
    period_s = statistics.median(period for period, _ in steps)
    outside_s = statistics.median(outside for _, outside in steps)
    return {
        "steps": len(steps),
        "step_ms": round(1000 * period_s, 2),
        "outside_ms": round(1000 * outside_s, 3),
        "share": round(outside_s / period_s, 4),
        "mean_share": round(sum(outside for _, outside in steps) / sum(period for period, _ in steps), 4),
    }


async def load(target: str, streams: int, tokens: int) -> None:
    """The client's side: that many streams at once, read to their end."""
    async with open_channel(target) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def one(index: int) -> None:
            ids = [1000 + (index * 131 + position * 7919) % 40_000 for position in range(PROMPT_TOKENS)]
            request = pb.GenerateRequest(
                prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)), max_new_tokens=tokens, ignore_eos=True
            )
            async for _ in stub.Generate(request):
                pass

        await asyncio.gather(*(one(index) for index in range(streams)))


async def measure(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    """By number of streams."""
    os.sched_setaffinity(0, {options.core})
    stopwatch = Stopwatch()
    results = {}
    settings = BackendSettings.load(["--listen", "127.0.0.1:0", "--max-active", str(max(options.streams))])
    async with host(settings) as hosted:
        llama_cpp.llama_decode = stopwatch
        for streams in options.streams:
            stopwatch.calls.clear()
            command = [sys.executable, "-m", "benchmarks.step_overhead", "--client", hosted.server.target]
            client = await asyncio.create_subprocess_exec(
                *command,
                *(
                    "--streams",
                    str(streams),
                    "--tokens",
                    str(options.tokens),
                    "--client-core",
                    str(options.client_core),
                ),
            )
            if await client.wait():
                raise RuntimeError("the client failed; its message is above")
            results[streams] = shares(stopwatch.calls, streams)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        os.sched_setaffinity(0, {options.client_core})
        asyncio.run(load(options.client, options.streams[0], options.tokens))
        return
    results = asyncio.run(measure(options))
    table = Table(title="Decode steps: llama.cpp's own work and the rest")
    for label in ("streams", "steps", "step ms", "outside llama_decode ms", "share (median)", "share (mean)"):
        table.add_column(label, justify="right")
    for streams, result in results.items():
        table.add_row(
            str(streams),
            f"{result['steps']}",
            f"{result['step_ms']:.2f}",
            f"{result['outside_ms']:.3f}",
            f"{result['share']:.1%}",
            f"{result['mean_share']:.1%}",
        )
    Console().print(table)
    print(json.dumps({"benchmark": "step_overhead", "streams": results}))


if __name__ == "__main__":
    main()
