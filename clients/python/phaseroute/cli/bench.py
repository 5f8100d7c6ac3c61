"""`phaseroute bench`: scenarios against services that run, policies in turn, every request measured."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from phaseroute.bench.output import BadFolder, Folder
from phaseroute.cli import signals
from phaseroute.cli.bench_run import BenchRun, Task
from phaseroute.cli.connect import Target, TlsCa, TlsCert, TlsKey, TokenFile, UseTls, security
from phaseroute.cli.demo_mixed import SIMULATED_PAIR
from phaseroute.cli.up import run_directory
from phaseroute.local.plan import NOTHING_KEPT, StackPlan, free_ports, make_plan, mixed_pair, unequal_pair
from phaseroute.scenarios.planned import Scenario
from router_service.policies.registry import make_policy
from service_kit.faults import InvalidRequest


class Local(Enum):
    """Fleets that can be started here."""

    MIXED = "mixed"
    PAIR = "pair"
    SIMULATED = "simulated"


def bench(
    scenario: Annotated[
        list[str] | None, typer.Option(help="What arrives when, such as article8 or trace:FILE; may be repeated.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; each backend on its own, two_phase and predictive if none is given."),
    ] = None,
    target: Target = "localhost:50051",
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    local: Annotated[
        Local | None,
        typer.Option(help="Start a fleet here instead: llama.cpp and MLX, two unequal llama.cpp, or two simulated."),
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="How often each scenario is played under each policy.")] = 3,
    seed: Annotated[int, typer.Option(help="Of all that is drawn; run n has the seed plus n.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder for CSV, JSON, plots and report.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many arrive.")] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second, where they are drawn.")] = None,
    gap_s: Annotated[float | None, typer.Option(help="Between two arrivals, where that is fixed.")] = None,
    cv: Annotated[float | None, typer.Option(help="Coefficient of variation of gamma-distributed gaps.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=2, help="Length of a prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Length of an answer.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="What an answer may come to at most.")] = None,
    hit_rate: Annotated[float | None, typer.Option(help="Share of requests that begin with a known prefix.")] = None,
    prefixes: Annotated[int | None, typer.Option(min=1, help="How many shared prefixes there are.")] = None,
) -> None:
    """Measure policies on a fleet that runs: same scenario, same arrivals, policies in turn."""
    overrides = {
        "requests": requests, "rate": rate, "gap_s": gap_s, "cv": cv, "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens, "max_new_tokens": max_new_tokens, "hit_rate": hit_rate, "prefixes": prefixes,
    }  # fmt: skip
    names = list(dict.fromkeys(scenario or ["article8"]))
    policies = tuple(dict.fromkeys(policy or ()))
    drawn = tuple(tuple(_build(name, overrides, seed + run) for name in names) for run in range(runs))
    plan = _plan(local) if local else None
    if plan:
        _check(policies, plan)
    try:
        folder = Folder(out) if out else None
    except BadFolder as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    console = Console(highlight=False, emoji=False)
    command = shlex.join(["phaseroute", *sys.argv[1:]])
    task = Task(scenarios=drawn, policies=policies, seed=seed, command=command, folder=folder)
    measured = BenchRun(console, task)
    try:
        if plan:
            _play_locally(console, measured, plan)
        else:
            signals.run(measured.at(target, security(tls, tls_ca, tls_cert, tls_key, token_file)))
    finally:
        _finish(measured)


def _finish(measured: BenchRun) -> None:
    """Whatever ended it, what was measured is shown and kept."""
    summary = measured.finish()
    if summary is not None:
        print(json.dumps(summary), flush=True)


def _play_locally(console: Console, measured: BenchRun, plan: StackPlan) -> None:
    """With a directory for logs, which is kept when it fails."""
    run_dir = run_directory()
    console.print(f"Logs, kept if this fails: {run_dir}", soft_wrap=True)
    try:
        signals.run(measured.local(plan, run_dir))
    except signals.Interrupted:
        shutil.rmtree(run_dir)
        raise
    shutil.rmtree(run_dir)


def _plan(local: Local) -> StackPlan:
    match local:
        case Local.SIMULATED:
            backends: Mapping[str, Mapping[str, Any]] = SIMULATED_PAIR
        case Local.MIXED | Local.PAIR:
            pair = mixed_pair() if local is Local.MIXED else unequal_pair()
            # Measured anew: saved rates may be from a busier hour.
            backends = {name: {**settings, "measure": True} for name, settings in pair.items()}
    return make_plan(backends, NOTHING_KEPT, free_ports(1)[0])


def _check(policies: tuple[str, ...], plan: StackPlan) -> None:
    names = [service.name for service in plan.backends]
    for policy in policies:
        try:
            make_policy(policy, names, random.Random(0))
        except InvalidRequest as error:
            raise typer.BadParameter(str(error), param_hint="--policy") from error


def _build(name: str, overrides: Mapping[str, Any], seed: int) -> Scenario:
    from phaseroute.scenarios.presets import BadScenario, ScenarioOptions, build

    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        built = build(name, options=ScenarioOptions(**given), seed=seed)
    except BadScenario as error:
        raise typer.BadParameter(str(error), param_hint="--scenario") from error
    if built.incidents:
        raise typer.BadParameter(
            f"{name!r} has backends fail or slow down, which only a simulator can do; use `phaseroute simulate`",
            param_hint="--scenario",
        )
    return built
