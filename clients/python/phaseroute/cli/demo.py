"""`phaseroute demo`: the same burst twice, all of it on the fast backend, then routed. With --mixed: two engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from phaseroute.aio import AsyncClient
from phaseroute.burst import Burst, BurstResult, run_burst
from phaseroute.cli import burst_view, signals, tables
from phaseroute.cli.burst_view import BurstBoard
from phaseroute.cli.demo_mixed import MixedDemo, mixed_plan
from phaseroute.cli.up import StackBoard, run_directory
from phaseroute.local.plan import (
    NOTHING_KEPT,
    StackPlan,
    free_ports,
    make_plan,
    stay_on_last_core,
    unequal_pair,
    usable_cores,
)
from phaseroute.local.stack import Stack
from phaseroute.prompts import SharedPrefixPrompts, shared_prefix_prompts
from phaseroute.requests import GenerateOptions
from phaseroute.results import Delta
from phaseroute.workloads import Sizes

GAP_S = 0.05
POLICY = "predictive"

SIMULATED_PAIR: Mapping[str, Mapping[str, Any]] = {
    "fast": {"engine": "simulated", "simulated_prefill_rate": 2551, "simulated_decode_ms": "1:3.41,3:36,4:43"},
    "small": {"engine": "simulated", "simulated_prefill_rate": 73, "simulated_decode_ms": "1:26.1"},
}
"""Step times of an Apple M2's GPU and CPU running Qwen2.5 0.5B, from a published experiment."""


def demo(
    requests: Annotated[int, typer.Option(min=1, help="Requests in the burst, 50 ms apart.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of each prompt; all but about 20 shared.")] = 516,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")] = 128,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="No model: backends that take given times and make up tokens.")
    ] = False,
    mixed: Annotated[
        bool, typer.Option("--mixed", help="llama.cpp and MLX instead, three workloads, five policies.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="With --mixed: how often each policy has its turn.")] = 1,
) -> None:
    """Compare a burst forced to one backend with the same burst routed over two unequal ones."""
    console = Console(highlight=False, emoji=False)
    if runs > 1 and not mixed:
        raise typer.BadParameter("needs --mixed", param_hint="--runs")
    if simulated:
        console.print("SIMULATED: no model runs; times are given, tokens are made up.", style="yellow")
    if mixed:
        sizes = Sizes(prompt_tokens, max_new_tokens)
        _play(console, MixedDemo(console, mixed_plan(simulated=simulated), requests, runs, sizes).play)
        return
    # Measured anew: saved rates may be from a busier hour.
    pair = {name: {**settings, "measure": True} for name, settings in unequal_pair().items()}
    plan = make_plan(SIMULATED_PAIR if simulated else pair, NOTHING_KEPT, free_ports(1)[0])
    _play(console, DemoRun(console, plan, requests, prompt_tokens, max_new_tokens).play)


def _play(console: Console, play: Callable[[Path], Coroutine[Any, Any, None]]) -> None:
    """With a directory for logs, which is kept when it fails."""
    run_dir = run_directory()
    console.print(f"Logs, kept if this fails: {run_dir}", soft_wrap=True)
    try:
        signals.run(play(run_dir))
    except signals.Interrupted:
        shutil.rmtree(run_dir)
        raise
    shutil.rmtree(run_dir)


class DemoRun:
    """One run of the demo, told as it goes."""

    def __init__(
        self, console: Console, plan: StackPlan, requests: int, prompt_tokens: int, max_new_tokens: int
    ) -> None:
        self._console = console
        self._plan = plan
        self._requests = requests
        self._prompt_tokens = prompt_tokens
        self._max_new_tokens = max_new_tokens
        self._cores = len(usable_cores())

    async def play(self, run_dir: Path) -> None:
        """Start, warm, measure twice, show, stop. Raises `StartFailed` or `PhaserouteError`."""
        board = StackBoard(self._console, tell_stopping=False)
        async with Stack(self._plan, run_dir, board.update) as stack:
            self._head("Starting two unequal backends and a router")
            with board.live():
                await stack.start_backends()
                stay_on_last_core()
                await stack.start_router()
            async with AsyncClient(self._plan.router.address) as client:
                self._console.print(tables.backend_table(await client.backends()))
                self._show(*await self._measure(client))

    async def _measure(self, client: AsyncClient) -> tuple[BurstResult, BurstResult]:
        prompts = await shared_prefix_prompts(client, self._prompt_tokens)
        await self._one_answer(client, prompts)
        fast = self._plan.backends[0].name
        forced = await self._burst(client, prompts, f"forced:{fast}", f"The burst, forced to {fast}")
        mixed = await self._burst(client, prompts, POLICY, f"The burst again with new questions, routed by {POLICY}")
        return forced, mixed

    async def _one_answer(self, client: AsyncClient, prompts: SharedPrefixPrompts) -> None:
        self._head("One answer, streamed (its prompt has to be computed first)")
        options = GenerateOptions(max_new_tokens=self._max_new_tokens, repetition_penalty=1.2)
        async with client.generate(prompts.next(), **options) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)
        print(flush=True)

    async def _burst(self, client: AsyncClient, prompts: SharedPrefixPrompts, policy: str, title: str) -> BurstResult:
        self._head(title)
        self._console.print("Warming the shared prefix on each backend")
        for backend in self._plan.backends:
            await client.complete(prompts.next(), max_new_tokens=1, backend=backend.name)
            usage = (await client.complete(prompts.next(), max_new_tokens=1, backend=backend.name)).usage
            reused = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were reused"
            self._console.print(f"  {backend.name}: {reused}")
        options = GenerateOptions(max_new_tokens=self._max_new_tokens, ignore_eos=True, policy=policy, workload="demo")
        burst = Burst(tuple(prompts.next() for _ in range(self._requests)), GAP_S, options)
        board = BurstBoard(self._console, self._requests, self._max_new_tokens)
        with board.live():
            return await run_burst(client, burst, board.update)

    def _show(self, forced: BurstResult, mixed: BurstResult) -> None:
        self._head(f"What {POLICY} compared for each request of the mixed burst")
        self._console.print(burst_view.decisions(mixed))
        self._head("Each request, forced against mixed")
        self._console.print(burst_view.requests_side_by_side(forced, mixed))
        self._console.print(burst_view.summary(forced, mixed), style="bold")
        self._console.print(
            f"One burst of each kind, measured by the client on this machine ({self._cores} cores) just now, "
            "client and router included. Other machines, models and loads give other numbers.",
            style="dim",
        )

    def _head(self, title: str) -> None:
        self._console.print(f"\n{title}", style="bold cyan")
