"""How long a CacheProbe takes beside a busy engine, by what is pinned to the engine's core.

    python -m benchmarks.probe_latency [--rounds 3] [--probes 100] [--cpu 0]

One llama.cpp backend with four streams decoding; a client asks for the reusable prefix of a new text of 660 tokens
every 50 ms. "engine": --cpus, which pins the engine's thread alone. "process": the whole process on that core. The two
alternate. Prints a table and, last, one JSON line. Linux, with taskset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.launch import backend
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc

TEXT = "The old keeper wrote a diary about ships. " * 60
STREAMS = 4
GAP_S = 0.05
PINNED = ("engine", "process")


async def measure(pinned: str, cpu: str, probes: int) -> list[float]:
    """Seconds of each probe."""
    prefix = ("taskset", "-c", cpu) if pinned == "process" else ()
    async with backend(["--cpus", cpu], prefix) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            stub.Generate(pb.GenerateRequest(prompt=pb.Prompt(text=f"{TEXT}{i}"), max_new_tokens=400, ignore_eos=True))
            for i in range(STREAMS)
        ]
        for call in calls:
            await call.read()
        readers = [asyncio.ensure_future(read_out(call)) for call in calls]
        seconds = []
        for index in range(probes):
            begun_s = time.perf_counter()
            await stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text=f"{TEXT}question {index}")))
            seconds.append(time.perf_counter() - begun_s)
            await asyncio.sleep(GAP_S)
        for call, reader in zip(calls, readers, strict=True):
            reader.cancel()
            call.cancel()
    return seconds


async def read_out(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
    """Read a stream to its end."""
    while await call.read() is not grpc.aio.EOF:
        pass


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--probes", type=int, default=100, help="in each round")
    parser.add_argument("--cpu", default="0", help="the engine's core")
    options = parser.parse_args()
    milliseconds: dict[str, list[float]] = {pinned: [] for pinned in PINNED}
    for _ in range(options.rounds):
        for pinned in PINNED:
            seconds = asyncio.run(measure(pinned, options.cpu, options.probes))
            milliseconds[pinned] += [1000 * each for each in seconds]
    table = Table(title="CacheProbe beside four decoding streams, ms")
    for label in ("pinned", "median", "p95", "max"):
        table.add_column(label, justify="left" if label == "pinned" else "right")
    summary = {}
    for pinned, values in milliseconds.items():
        p95 = statistics.quantiles(values, n=20)[-1]
        summary[pinned] = {
            "median_ms": round(statistics.median(values), 2),
            "p95_ms": round(p95, 2),
            "max_ms": round(max(values), 2),
        }
        table.add_row(pinned, *(str(value) for value in summary[pinned].values()))
    Console().print(table)
    print(json.dumps({"benchmark": "probe_latency", "rounds": options.rounds, "probes": options.probes, **summary}))


if __name__ == "__main__":
    main()
