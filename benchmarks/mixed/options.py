"""What benchmarks.mixed_burst was told."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backend_service.settings import parse_cpus
from phaseroute.comparison import FORCED_PREFIX
from phaseroute.local.plan import can_pin, flags_of, mixed_pair, usable_cores
from phaseroute.workloads import WORKLOADS, Sizes


@dataclass(frozen=True, slots=True)
class Sweep:
    """One backend with more and more requests at once."""

    backend: str
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """A whole benchmark."""

    backends: Mapping[str, tuple[str, ...]]
    """Flags of `phaseroute-backend` by name."""
    workloads: tuple[str, ...]
    policies: tuple[str, ...]
    requests: tuple[int, ...]
    runs: int
    sizes: Sizes
    sweeps: tuple[Sweep, ...]
    client_cpus: frozenset[int]
    """Of this process and the router; empty: all."""
    out: Path | None


def parse(description: str | None, arguments: Sequence[str] | None = None) -> Options:
    """From the command line; exits with what is wrong and how it should be."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend", action="append", default=[], metavar='NAME="FLAGS"', help="repeat; default: mixed_pair()"
    )
    parser.add_argument(
        "--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS), help="with none: only --sweep"
    )
    parser.add_argument("--policies", nargs="+", help="default: forced:NAME for each, round_robin, two_phase")
    parser.add_argument("--requests", type=int, nargs="+", default=[8], help="in a burst, one comparison each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=Sizes().prompt_tokens)
    parser.add_argument("--new-tokens", type=int, default=Sizes().new_tokens)
    parser.add_argument("--sweep", action="append", default=[], metavar="NAME=1,2,4,8", help="repeat")
    parser.add_argument(
        "--client-cpus", type=_cpus, help="of client and router; default: all, the last with no --backend"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where a file with every request goes")
    told = parser.parse_args(arguments)
    try:
        backends = dict(_backend(item) for item in told.backend) or _default_pair()
        sweeps = tuple(_sweep(item, backends) for item in told.sweep)
    except ValueError as error:
        parser.error(str(error))
    for name, values in (("requests", told.requests), ("runs", [told.runs]), ("prompt-tokens", [told.prompt_tokens])):
        if min(values) < 1:
            parser.error(f"--{name} must be 1 or more")
    if told.new_tokens < 1:
        parser.error("--new-tokens must be 1 or more")
    if not told.workloads and not sweeps:
        parser.error("nothing to do: name --workloads, or a --sweep")
    forced = tuple(f"{FORCED_PREFIX}{name}" for name in backends)
    default_cpus = frozenset(usable_cores()[-1:]) if can_pin() and not told.backend else frozenset[int]()
    return Options(
        backends=backends,
        workloads=tuple(told.workloads),
        policies=tuple(told.policies or (*forced, "round_robin", "two_phase")),
        requests=tuple(told.requests),
        runs=told.runs,
        sizes=Sizes(told.prompt_tokens, told.new_tokens),
        sweeps=sweeps,
        client_cpus=default_cpus if told.client_cpus is None else told.client_cpus,
        out=told.out,
    )


def _default_pair() -> Mapping[str, tuple[str, ...]]:
    return {name: flags_of({**settings, "measure": True}) for name, settings in mixed_pair().items()}


def _backend(item: str) -> tuple[str, tuple[str, ...]]:
    name, equals, flags = item.partition("=")
    if not name or not equals:
        raise ValueError(f'--backend {item!r} is not NAME="FLAGS"; write it like gpu="--engine mlx --device gpu"')
    return name, tuple(shlex.split(flags))


def _sweep(item: str, backends: Mapping[str, object]) -> Sweep:
    name, _, counts = item.partition("=")
    if name not in backends:
        raise ValueError(f"--sweep {item!r} names no backend; there are {', '.join(backends)}")
    numbers = [int(count) if count.isdecimal() else 0 for count in counts.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"--sweep {item!r} is not NAME=1,2,4; write the numbers of requests, with commas")
    return Sweep(name, tuple(numbers))


def _cpus(text: str) -> frozenset[int]:
    return parse_cpus(text)
