"""One chaos run: a fleet, its load, its faults, and the books."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from phaseroute.local.child import StartFailed
from phaseroute.v1 import inference_pb2 as pb
from tests.chaos.fleet import Fleet, FleetBroken, FleetPlan
from tests.chaos.injector import Injector
from tests.chaos.ledger import Ledger
from tests.chaos.pace import Pace
from tests.chaos.plan import PlannedFault, plan_faults
from tests.chaos.player import Player
from tests.chaos.reference import Answer, Reference
from tests.chaos.report import Report
from tests.chaos.vitals import Vitals, leftovers
from tests.chaos.workload import PlannedRequest, mixed_load, small_load

CONTEXT_TOKENS = 16_384
AT_ONCE = {"simulated": 16, "llama_cpp": 3}
MOST_ROUTER_GROWTH_MIB = 24.0
"""Of a router that has been up a while; of one that lives for minutes, in which its tables are still filling. The soak
is what looks closely."""
MOST_ROUTER_FDS = 12
"""Connections come and go with faults; a leak is one descriptor a fault or a request."""
MOST_ROUTER_THREADS = 4
WARM_UP = 0.4
_BACKEND = ("--log-format", "json", "--drain-grace-s", "1")
_SIMULATED = (
    "--engine", "simulated", "--simulated-prefill-rate", "20000", "--simulated-decode-ms", "1:12,4:16,8:24",
    "--max-active", "8", "--kv-tokens", str(CONTEXT_TOKENS),
)  # fmt: skip
_ROUTER = (
    "--log-format", "json", "--drain-grace-s", "30", "--status-silence-s", "2.5",
    # Faults come so thick here that a long answer meets several.
    "--max-attempts", "20", "--max-replayed-tokens", "16384",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """What to run; with the same options the same requests and the same faults are planned."""

    requests: int = 2000
    faults: int = 200
    seed: int = 1
    engine: Literal["simulated", "llama_cpp"] = "simulated"
    router_faults: bool = True

    @property
    def backends(self) -> int:
        """Real models on few cores: fewer."""
        return 3 if self.engine == "simulated" else 2

    def fleet(self) -> FleetPlan:
        """The processes."""
        engine = _SIMULATED if self.engine == "simulated" else ("--engine", "llama_cpp", "--threads", "1")
        return FleetPlan([(*_BACKEND, *engine)] * self.backends, _ROUTER)

    def load(self) -> Sequence[PlannedRequest]:
        """The requests."""
        load = mixed_load if self.engine == "simulated" else small_load
        return list(load(self.seed, self.requests))

    def plan(self) -> Sequence[PlannedFault]:
        """The faults."""
        return plan_faults(self.seed, self.faults, self.backends, router_faults=self.router_faults)


async def run(options: Options, run_dir: Path) -> Report:
    """Play it. Logs of processes, faults and requests are in `run_dir`. Raises `StartFailed` or `FleetBroken` when the
    fleet does not even come up."""
    began_s = time.monotonic()
    ledger, vitals, problems = Ledger(), Vitals(), []
    pace = Pace(options.requests, options.faults)
    load = options.load()
    with (run_dir / "faults.jsonl").open("w") as log:
        async with Fleet(options.fleet(), run_dir) as fleet:
            injector = Injector(fleet, options.plan(), pace, log)
            answers = await _answers(options, fleet, load)
            player = Player(fleet, ledger, answers)
            async with player.connected(), vitals.watching(fleet):
                try:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(injector.run())
                        group.create_task(player.play(load, AT_ONCE[options.engine], pace))
                except* (FleetBroken, StartFailed, TimeoutError) as failures:
                    problems += [f"the run stopped: {failure}" for failure in _leaves(failures)]
                problems += await leftovers(fleet)
                vitals.sample(fleet.router)
            growth = vitals.growth(fleet.router, WARM_UP)
            for process in fleet.processes:
                try:
                    process.check()
                except FleetBroken as failure:
                    problems.append(str(failure))
    lines = [f"{entry.to_json()}\n" for entry in ledger.entries.values()]
    (run_dir / "requests.jsonl").write_text("".join(lines))
    problems += [*ledger.problems, *injector.problems]
    if lost := sorted(ledger.lost):
        problems.append(f"{len(lost)} requests never ended: {lost[:20]}")
    if growth is not None:
        problems += _grown(growth.rss_mib, growth.fds, growth.threads)
    return Report(asdict(options), ledger, injector.injected, growth, problems, time.monotonic() - began_s)


async def _answers(
    options: Options, fleet: Fleet, load: Sequence[PlannedRequest]
) -> Callable[[PlannedRequest], Answer]:
    """What each request must get: worked out, or asked for while nothing disturbs the fleet."""
    if options.engine == "simulated":
        return Reference(CONTEXT_TOKENS).answer
    undisturbed: dict[int, Answer] = {}
    for planned in load:
        undisturbed[planned.index] = await _ask(fleet, planned)
    return lambda planned: undisturbed[planned.index]


async def _ask(fleet: Fleet, planned: PlannedRequest) -> Answer:
    nobody = Player(fleet, Ledger(), lambda _: Answer((), "", pb.FINISH_REASON_UNSPECIFIED, 0))
    async with nobody.connected():
        ending = await nobody.ask(planned)
    if ending.finished is None:
        raise FleetBroken(f"request {planned.index} failed before any fault: {ending.code} {ending.message}")
    return Answer(ending.token_ids, ending.text, ending.finished.finish_reason, ending.finished.usage.prompt_tokens)


def _grown(rss_mib: float, fds: int, threads: int) -> list[str]:
    checks = (
        ("MiB of memory", rss_mib, MOST_ROUTER_GROWTH_MIB),
        ("file descriptors", fds, MOST_ROUTER_FDS),
        ("threads", threads, MOST_ROUTER_THREADS),
    )
    return [f"the router grew by {by:g} {what}, more than {most:g}" for what, by, most in checks if by > most]


def _leaves(failures: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    nested = (_leaves(one) if isinstance(one, BaseExceptionGroup) else [one] for one in failures.exceptions)
    return list(itertools.chain.from_iterable(nested))
