"""How long a stream stands still when the backend that it comes from is killed.

    python -m benchmarks.recovery [--rounds 50] [--signal kill|stop] [--backends 3]

Scope: noticing the loss, deciding anew, and the other backend's first token. Set-up: simulated backends and a router,
a process each on this machine; one stream at a time. In mid-stream its backend gets the signal. Measured by the client:
from the signal to the first token of the other backend ("stall"), and the same less the time that this backend needs to
compute prompt and answer again by its prefill rate ("recovery"). Then the killed backend is started again on its
port, and "rejoin" is from its word that it serves to the router's. Each answer is compared, token for token, with an
undisturbed one. With `--signal stop` the process is stopped, not ended: nothing but its silence tells the router.
Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
from rich.console import Console
from rich.table import Table

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from phaseroute.v1 import router_pb2, router_pb2_grpc
from service_kit.channels import open_channel

PREFILL_TOKENS_PER_S = 10_000
DECODE_MS = 5
PROMPT_TOKENS = 400
ANSWER_TOKENS = 200
TARGET_S = 1.0
"""For the 95th percentile of the recovery from a kill."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Node:
    """A service that can be killed and started again on its port."""

    def __init__(self, module: str, *flags: str) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self._command = ("-m", module, "--listen", self.address, "--log-format", "json", *flags)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it says that it serves."""
        self._process = await asyncio.create_subprocess_exec(sys.executable, *self._command, stderr=PIPE)
        assert self._process.stderr is not None
        lines = []
        async for line in self._process.stderr:
            lines.append(line.decode().rstrip())
            if '"serving"' in lines[-1]:
                self._reading = asyncio.ensure_future(_read_away(self._process.stderr))
                return
        raise RuntimeError(f"{self._command[1]} did not start:\n" + "\n".join(lines))

    def signal(self, number: signal.Signals) -> None:
        """Now."""
        assert self._process is not None
        os.kill(self._process.pid, number)

    async def end(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._process is not None:
            await self._process.wait()
        if self._reading is not None:
            await self._reading


@dataclass(frozen=True)
class Recovery:
    """One stream that lost its backend."""

    sent_tokens: int
    """When the signal was sent."""
    stall_s: float
    replay_s: float
    """The part of it in which the other backend computes what was there before."""
    rejoin_s: float

    @property
    def recovery_s(self) -> float:
        """The stall without the replay."""
        return self.stall_s - self.replay_s


class Bench:
    """A router and its backends."""

    def __init__(self, channel: grpc.aio.Channel, backends: dict[str, Node]) -> None:
        self._inference = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._router = router_pb2_grpc.RouterServiceStub(channel)  # type: ignore[no-untyped-call]
        self._backends = backends

    async def until_all_serve(self) -> None:
        """As the router sees it. Raises `TimeoutError`."""
        async with asyncio.timeout(30):
            while True:
                listed = await self._router.ListBackends(router_pb2.ListBackendsRequest())
                if all(entry.state == router_pb2.BACKEND_STATE_SERVING for entry in listed.backends):
                    return
                await asyncio.sleep(0.02)

    async def lose_one(self, prompt: str, sent_tokens: int, number: signal.Signals) -> Recovery:
        """Run a stream, take its backend away after so many tokens, and bring that back afterwards. Raises
        `RuntimeError` when the answer is not the undisturbed one."""
        request = pb.GenerateRequest(prompt=pb.Prompt(text=prompt), max_new_tokens=ANSWER_TOKENS, ignore_eos=True)
        watch = self._router.WatchDecisions(router_pb2.WatchDecisionsRequest())
        await watch.initial_metadata()
        call = self._inference.Generate(request)
        answer: list[int] = []
        while len(answer) < sent_tokens:
            answer += (await call.read()).delta.token_ids
        victim = self._backends[(await _decision(watch)).selected]
        signalled_s = time.perf_counter()
        victim.signal(number)
        decided = asyncio.ensure_future(_decision(watch))
        known, resumed_s = len(answer), 0.0
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.delta.token_ids and not resumed_s:
                if decided.done():
                    resumed_s = time.perf_counter()
                else:
                    known += len(response.delta.token_ids)
            answer += response.delta.token_ids
        watch.cancel()
        undisturbed = [token async for each in self._inference.Generate(request) for token in each.delta.token_ids]
        if answer != undisturbed:
            raise RuntimeError(f"the answer differs from the undisturbed one after {sent_tokens} tokens; that is a bug")
        await victim.end()
        await victim.start()
        listening_s = time.perf_counter()
        await self.until_all_serve()
        return Recovery(
            sent_tokens,
            resumed_s - signalled_s,
            (len(prompt) + known) / PREFILL_TOKENS_PER_S,
            time.perf_counter() - listening_s,
        )


@asynccontextmanager
async def bench(backends: int) -> AsyncIterator[Bench]:
    """Everything started and serving."""
    speed = (
        "--simulated-prefill-rate",
        str(PREFILL_TOKENS_PER_S),
        "--simulated-decode-ms",
        f"1:{DECODE_MS}",
    )
    nodes = {f"b{index}": Node("backend_service", "--engine", "simulated", *speed) for index in range(backends)}
    flags = [flag for name, node in nodes.items() for flag in ("--backend", f"{name}={node.address}")]
    router = Node("router_service", *flags)
    async with AsyncExitStack() as stack:
        for node in (*nodes.values(), router):
            stack.push_async_callback(node.end)
        await asyncio.gather(*(node.start() for node in nodes.values()))
        await router.start()
        running = Bench(await stack.enter_async_context(open_channel(router.address)), nodes)
        await running.until_all_serve()
        yield running


async def measure(rounds: int, backends: int, number: signal.Signals, seed: int = 0) -> list[Recovery]:
    """One stream after the other, each with a prompt of its own."""
    chance = random.Random(seed)
    async with bench(backends) as running:
        recoveries = []
        for _ in range(rounds):
            prompt = "".join(chance.choices("etaoin shrdlu", k=PROMPT_TOKENS))
            recoveries.append(await running.lose_one(prompt, chance.randrange(1, ANSWER_TOKENS // 2), number))
        return recoveries


_Watch = grpc.aio.UnaryStreamCall[router_pb2.WatchDecisionsRequest, router_pb2.WatchDecisionsResponse]


async def _decision(watch: _Watch) -> router_pb2.Decision:
    """The next one."""
    async for news in watch:
        if news.HasField("decision"):
            return news.decision
    raise RuntimeError("the router ended its stream of decisions")


async def _read_away(log: asyncio.StreamReader) -> None:
    while await log.read(65_536):
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Command line; 0 when the target was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--backends", type=int, default=3)
    parser.add_argument("--signal", choices=SIGNALS, default="kill")
    options = parser.parse_args()
    recoveries = asyncio.run(measure(options.rounds, options.backends, SIGNALS[options.signal]))
    table = Table(title=f"SIG{options.signal.upper()} in mid-stream, {options.rounds} times (simulated engines), ms")
    for label in ("", "median", "p95", "max"):
        table.add_column(label, justify="left" if not label else "right")
    summary = {}
    for label in ("stall", "recovery", "rejoin"):
        values = [getattr(each, f"{label}_s") for each in recoveries]
        summary[f"{label}_s"] = {
            "median": round(statistics.median(values), 4),
            "p95": round(_p95(values), 4),
            "max": round(max(values), 4),
        }
        table.add_row(label, *(f"{1e3 * value:.0f}" for value in summary[f"{label}_s"].values()))
    Console().print(table)
    print(
        json.dumps(
            {
                "benchmark": "recovery",
                "simulated": True,
                "signal": options.signal,
                "rounds": options.rounds,
                "backends": options.backends,
                "answers_equal": len(recoveries),
                "target_p95_s": TARGET_S if options.signal == "kill" else None,
                **summary,
            }
        )
    )
    return int(options.signal == "kill" and summary["recovery_s"]["p95"] >= TARGET_S)


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


if __name__ == "__main__":
    sys.exit(main())
