"""`phaseroute simulate`: scenarios in virtual time, on backends that exist only as numbers."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from phaseroute.bench.output import BadFolder, Folder
from phaseroute.scenarios.bounds import BadScenario
from phaseroute.scenarios.incidents import parse_incident
from phaseroute.scenarios.options import ScenarioOptions
from phaseroute.scenarios.planned import Incident, IncidentKind, Scenario
from phaseroute.scenarios.presets import build

if TYPE_CHECKING:
    from simulator.profiles import Profile

DEFAULT_SCENARIOS = ("article8", "article48")
DEFAULT_FLEET = "article"
LARGEST_AUTO = 16
"""With --max-active auto, as a backend has it."""
MOST_ACTIVE = 512
MOST_RUNS = 1000


def simulate(
    scenario: Annotated[
        list[str] | None, typer.Option(help="What arrives when, such as poisson or trace:FILE; may be repeated.")
    ] = None,
    fleet: Annotated[
        str | None, typer.Option(help="Backends that are built in: article, mixed, wide:1000, ...")
    ] = None,
    profiles: Annotated[Path | None, typer.Option(help="Backends from a JSON file instead.")] = None,
    from_router: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Backends like those of a router that runs instead.")
    ] = None,
    save_profiles: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the backends to a file.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated; forced to the fastest backend, two_phase and predictive if none is given."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="How output lengths are estimated: history, ratio or budget.")
    ] = "history",
    max_active: Annotated[str | None, typer.Option(metavar="auto|N", help="Largest batch of every backend.")] = None,
    runs: Annotated[int, typer.Option(help="How often each scenario is played under each policy.")] = 1,
    seed: Annotated[int, typer.Option(help="Of all that is drawn; run n has the seed plus n.")] = 0,
    learn: Annotated[
        bool | None,
        typer.Option(help="Backends fit their step models while they run; by default only where one slows down."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="How many arrive.")] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="gap:0.05, poisson:rate=1, gamma:rate=1,cv=4, onoff:..., trace:FILE"),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second, where they are drawn.")] = None,
    gap_s: Annotated[float | None, typer.Option(help="Between two arrivals, where that is fixed.")] = None,
    cv: Annotated[float | None, typer.Option(help="Coefficient of variation of gamma-distributed gaps.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Lengths of prompts: 516, uniform:low=..., lognormal:..., geometric:..."),
    ] = None,
    budgets: Annotated[str | None, typer.Option(metavar="SPEC", help="What answers may come to, likewise.")] = None,
    answers: Annotated[str | None, typer.Option(metavar="SPEC", help="What they come to, likewise.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Length of an answer.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="What an answer may come to at most.")] = None,
    sharing: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="none, shared:496, pool:prefixes=20,tokens=400,hit_rate=0.6, turns:8"),
    ] = None,
    prefix_tokens: Annotated[int | None, typer.Option(help="Length of a shared prefix.")] = None,
    hit_rate: Annotated[float | None, typer.Option(help="Share of requests that begin with a known prefix.")] = None,
    prefixes: Annotated[int | None, typer.Option(help="How many shared prefixes there are.")] = None,
    deadline_s: Annotated[float | None, typer.Option(help="Of every request, from its arrival.")] = None,
    ttft_slo_s: Annotated[float | None, typer.Option(help="Limit for the first token of every request.")] = None,
    fail: Annotated[list[str] | None, typer.Option(metavar="BACKEND@S", help="It is gone from then on.")] = None,
    come_back: Annotated[
        list[str] | None, typer.Option("--return", metavar="BACKEND@S", help="It is back, with an empty cache.")
    ] = None,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="BACKEND@S:FACTOR", help="Its steps take so many times as long.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder for CSV, JSON, traces and plots.")] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots into --out.")] = True,
    json_only: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Play scenarios in virtual time, on SIMULATED backends: real policies and schedulers, no model, no waiting."""
    from phaseroute.cli.simulate_run import SimulateRun, Task

    if not 1 <= runs <= MOST_RUNS:
        _refuse("--runs", f"is {runs}; give 1 to {MOST_RUNS}")
    backends = _backends(fleet, profiles, from_router, max_active, seed)
    incidents = _incidents(backends, {"--fail": fail, "--return": come_back, "--slow": slow})
    options = ScenarioOptions(
        requests=requests, arrivals=arrivals, rate=rate, gap_s=gap_s, cv=cv, prompts=prompts, budgets=budgets,
        answers=answers, prompt_tokens=prompt_tokens, new_tokens=new_tokens, max_new_tokens=max_new_tokens,
        sharing=sharing, prefix_tokens=prefix_tokens, hit_rate=hit_rate, prefixes=prefixes, deadline_s=deadline_s,
        ttft_slo_s=ttft_slo_s,
    )  # fmt: skip
    names = tuple(dict.fromkeys(scenario or DEFAULT_SCENARIOS))
    drawn = tuple(tuple(_build(name, options, seed + run, incidents) for name in names) for run in range(runs))
    policies = _policies(policy, backends)
    _check_lengths(lengths)
    if save_profiles:
        _save(save_profiles, backends)
    task = Task(
        scenarios=drawn,
        backends=backends,
        policies=policies,
        lengths=lengths,
        seed=seed,
        learn=any(incident.kind is IncidentKind.SLOW for incident in incidents) if learn is None else learn,
        command=shlex.join(["phaseroute", *sys.argv[1:]]),
        folder=_folder(out),
        out=out or Path(),
        plots=plots,
    )
    SimulateRun(Console(highlight=False, emoji=False, quiet=json_only), task).run()


def _refuse(flag: str, problem: object) -> NoReturn:
    """One line and exit code 2, as for any wrong flag."""
    Console(stderr=True, highlight=False, emoji=False).print(
        f"{flag}: {problem}", style="red", markup=False, soft_wrap=True
    )
    raise typer.Exit(2)


def _backends(
    fleet: str | None, file: Path | None, router: str | None, max_active: str | None, seed: int
) -> dict[str, Profile]:
    from simulator import devices
    from simulator.profile_file import load_profiles
    from simulator.profiles import BadProfile

    given = [flag for flag, value in (("--fleet", fleet), ("--profiles", file), ("--from-router", router)) if value]
    if len(given) > 1:
        _refuse(given[1], f"the backends are given by {given[0]} already; leave one of them out")
    flag = given[0] if given else "--fleet"
    try:
        if file:
            backends = load_profiles(file)
        elif router:
            backends = _live(router)
        else:
            backends = devices.fleet(fleet or DEFAULT_FLEET, seed=seed)
    except BadProfile as error:
        _refuse(flag, error)
    if max_active is None:
        return backends
    if max_active != "auto" and not (max_active.isdecimal() and 1 <= int(max_active) <= MOST_ACTIVE):
        _refuse("--max-active", f"is {max_active!r}; give auto, or 1 to {MOST_ACTIVE}")
    auto = max_active == "auto"
    # One new profile for each old one: step models are fitted once a profile.
    changed = {
        id(each): replace(each, max_active=LARGEST_AUTO if auto else int(max_active), max_active_auto=auto)
        for each in backends.values()
    }
    return {name: changed[id(each)] for name, each in backends.items()}


def _live(target: str) -> dict[str, Profile]:
    """Like the serving backends of a router. Raises `BadProfile` for one that does not tell enough, `PhaserouteError`
    when nobody answers."""
    from phaseroute.client import Client
    from phaseroute.v1 import router_pb2
    from simulator.profiles import BadProfile, profile_of_status

    with Client(target) as client:
        entries = client.backends(timeout_s=10)
    profiles = {}
    for entry in entries:
        if entry.state == router_pb2.BACKEND_STATE_SERVING:
            try:
                profiles[entry.name] = profile_of_status(entry.status)
            except BadProfile as error:
                raise BadProfile(f"backend {entry.name}: {error}") from error
    if not profiles:
        raise BadProfile(f"no backend of {target} is serving; see `phaseroute backends`")
    return profiles


def _incidents(backends: Mapping[str, Profile], flags: Mapping[str, list[str] | None]) -> tuple[Incident, ...]:
    incidents = []
    for flag, texts in flags.items():
        for text in texts or ():
            try:
                incident = parse_incident(IncidentKind(flag.removeprefix("--")), text)
            except BadScenario as error:
                _refuse(flag, error)
            if incident.backend not in backends:
                _refuse(flag, f"{text!r}: no backend is called {incident.backend!r}; there are {_some(backends)}")
            incidents.append(incident)
    return tuple(sorted(incidents, key=lambda incident: incident.at_s))


def _build(name: str, options: ScenarioOptions, seed: int, incidents: tuple[Incident, ...]) -> Scenario:
    try:
        built = build(name, options=options, seed=seed)
    except BadScenario as error:
        _refuse(f"--{error.option.replace('_', '-')}" if error.option else "--scenario", error)
    return replace(built, incidents=incidents)


def _policies(given: Sequence[str] | None, backends: Mapping[str, Profile]) -> tuple[str, ...]:
    from phaseroute.cli.simulate_run import default_policies
    from router_service.policies.registry import make_policy
    from service_kit.faults import InvalidRequest

    policies = tuple(dict.fromkeys(given or default_policies(backends)))
    for policy in policies:
        try:
            make_policy(policy, backends.keys(), random.Random(0))
        except InvalidRequest as error:
            _refuse("--policy", error.problem)
    return policies


def _check_lengths(name: str) -> None:
    from router_service.lengths import make_lengths
    from service_kit.faults import InvalidRequest

    try:
        make_lengths(name)
    except InvalidRequest as error:
        _refuse("--lengths", error.problem)


def _save(path: Path, backends: Mapping[str, Profile]) -> None:
    from simulator.profile_file import save_profiles
    from simulator.profiles import BadProfile

    try:
        save_profiles(path, backends)
    except BadProfile as error:
        _refuse("--save-profiles", error)


def _folder(out: Path | None) -> Folder | None:
    try:
        return Folder(out) if out else None
    except BadFolder as error:
        _refuse("--out", error)


def _some(names: Mapping[str, Any], most: int = 20) -> str:
    shown = ", ".join(list(names)[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
