"""How long a cancelled stream keeps its slot: from the client's cancel to the Status that no longer has the request.

    python -m benchmarks.cancel_latency [--rounds 12] [--cpus 0] [-- extra flags of the backend]

Starts one llama.cpp backend with the packaged model as a process of its own and cancels requests that are queued, in
prefill and decoding, beside three others that decode. Prints a table and, last, one JSON line. Seconds are the
client's: they include the wire and the wait for the step that runs when the cancel arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from benchmarks.launch import backend
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc

TARGET_S = 0.25
PHASES = {
    "queued": pb.REQUEST_PHASE_QUEUED,
    "prefill": pb.REQUEST_PHASE_PREFILL,
    "decode": pb.REQUEST_PHASE_DECODE,
}
BESIDE = 3


def wire(attempt_id: str, prompt_tokens: int) -> pb.GenerateRequest:
    """A long request with a prompt of its own."""
    start = sum(attempt_id.encode()) * 131 % 20_000
    ids = [1000 + (start + position * 7919) % 40_000 for position in range(prompt_tokens)]
    return pb.GenerateRequest(
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=ids)),
        max_new_tokens=400,
        ignore_eos=True,
        attempt=pb.Attempt(id=attempt_id),
    )


class Bench:
    """One backend, watched."""

    def __init__(self, stub: pb_grpc.InferenceServiceStub) -> None:
        self._stub = stub

    async def until(self, condition: Callable[[dict[str, int]], bool]) -> float:
        """When a Status first met the condition on phases by attempt id."""
        call = self._stub.WatchStatus(pb.WatchStatusRequest())
        try:
            async for response in call:
                if condition({entry.attempt_id: entry.phase for entry in response.status.requests}):
                    return time.perf_counter()
        finally:
            call.cancel()
        raise RuntimeError("the status stream ended")

    async def cancel_once(self, phase: str, round_: int) -> float:
        """Seconds from cancel to gone."""
        beside = BESIDE + (phase == "queued")
        others = [self._stub.Generate(wire(f"other {round_} {index}", 20)) for index in range(beside)]
        await self.until(lambda phases: list(phases.values()).count(pb.REQUEST_PHASE_DECODE) == beside)
        victim = self._stub.Generate(wire(f"victim {round_}", 600))
        await self.until(lambda phases: phases.get(f"victim {round_}") == PHASES[phase])
        cancelled_s = time.perf_counter()
        victim.cancel()
        gone_s = await self.until(lambda phases: f"victim {round_}" not in phases)
        for other in others:
            other.cancel()
        await self.until(lambda phases: not phases)
        return gone_s - cancelled_s


async def measure(rounds: int, backend_flags: list[str]) -> dict[str, list[float]]:
    """Seconds by phase; the phases alternate."""
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    async with backend(backend_flags) as channel:
        bench = Bench(pb_grpc.InferenceServiceStub(channel))  # type: ignore[no-untyped-call]
        for round_ in range(rounds):
            for phase in PHASES:
                seconds[phase].append(await bench.cancel_once(phase, round_))
    return seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cpus", default="0", help="cores of the backend")
    parser.add_argument("backend_flags", nargs="*", help="more flags for the backend, after --")
    options = parser.parse_args()
    seconds = asyncio.run(measure(options.rounds, ["--cpus", options.cpus, *options.backend_flags]))
    table = Table(title=f"Cancel to free slot, ms ({options.rounds} rounds, target {TARGET_S * 1000:.0f} ms)")
    for label in ("phase", "median", "max"):
        table.add_column(label, justify="left" if label == "phase" else "right")
    for phase, values in seconds.items():
        table.add_row(phase, f"{1000 * statistics.median(values):.0f}", f"{1000 * max(values):.0f}")
    Console().print(table)
    summary = {
        phase: {"median_s": round(statistics.median(values), 4), "max_s": round(max(values), 4)}
        for phase, values in seconds.items()
    }
    print(json.dumps({"benchmark": "cancel_latency", "rounds": options.rounds, "target_s": TARGET_S, **summary}))


if __name__ == "__main__":
    main()
