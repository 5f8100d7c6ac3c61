"""What to run on this machine: from a TOML file, from flags, or the two unequal backends of a demo."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_PORT = 50051
MAX_DEMO_THREADS = 8
"""A model of the default's size gains nothing from more."""


class BadPlan(Exception):
    """The file cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run, and where it will answer."""

    name: str
    module: str
    """Run as `python -m MODULE`."""
    arguments: tuple[str, ...]
    address: str
    """gRPC target to reach it at."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """A router, and those of its backends that are to be started here."""

    backends: tuple[Service, ...]
    router: Service


def load_plan(path: Path, port: int | None = None) -> StackPlan:
    """A plan from TOML. Raises `BadPlan`.

    `[router]` takes the flags of `phaseroute-router`, `[backends.NAME]` those of `phaseroute-backend`, with underscores
    for dashes; `listen` is a free port where it is left out. A backend with a `target` runs already, elsewhere. `port`
    replaces the router's.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadPlan(f"{path} cannot be read: {error.strerror}. Correct --config.") from error
    except ValueError as error:
        raise BadPlan(f"{path} is not valid TOML: {error}.") from error
    unknown = tables.keys() - {"router", "backends"}
    if unknown:
        raise BadPlan(f"{path} has a [{sorted(unknown)[0]}]; it can have [router] and [backends.NAME].")
    backends, router = tables.get("backends", {}), tables.get("router", {})
    if not isinstance(router, dict) or not isinstance(backends, dict) or not backends:
        raise BadPlan(f"{path} names no backend; add a [backends.NAME] for each.")
    for name, options in backends.items():
        if not isinstance(options, dict):
            raise BadPlan(f"{path}: backends.{name} is not a table; write it as [backends.{name}].")
        if "target" in options and len(options) > 1:
            raise BadPlan(f"{path}: [backends.{name}] has a target, so it is not started here; remove its other keys.")
    return make_plan(backends, router, port)


NOTHING_KEPT: Mapping[str, Any] = {"keep_lengths": False}
"""Router settings under which a measurement learns nothing from an earlier one."""


def make_plan(
    backends: Mapping[str, Mapping[str, Any]], router: Mapping[str, Any], port: int | None = None
) -> StackPlan:
    """A plan from settings by backend name."""
    spare = iter(free_ports(len(backends)))
    services, targets = [], []
    for name, options in backends.items():
        target = options.get("target")
        if target is None:
            listen = options.get("listen", f"127.0.0.1:{next(spare)}")
            target = _reachable(listen)
            services.append(Service(name, "backend_service", flags_of({**options, "listen": listen}), target))
        targets.append(f"{name}={target}")
    listen = router.get("listen", f"127.0.0.1:{DEFAULT_PORT}")
    if port is not None:
        listen = f"{listen.rpartition(':')[0]}:{port}"
    return StackPlan(tuple(services), _router({**router, "listen": listen}, targets))


def plan_of_flags(backends: Mapping[str, Sequence[str]]) -> StackPlan:
    """A plan from flags of `phaseroute-backend` by backend name, all but `--listen`; everything on free ports."""
    *ports, router_port = free_ports(len(backends) + 1)
    services = []
    for (name, flags), port in zip(backends.items(), ports, strict=True):
        address = f"127.0.0.1:{port}"
        services.append(Service(name, "backend_service", (*flags, "--listen", address), address))
    targets = [f"{service.name}={service.address}" for service in services]
    return StackPlan(tuple(services), _router({"listen": f"127.0.0.1:{router_port}", **NOTHING_KEPT}, targets))


def unequal_pair() -> Mapping[str, Mapping[str, Any]]:
    """Settings of two llama.cpp backends of unequal strength on this machine.

    `fast` has every core but the last, and a full-precision KV cache. `small` has one thread on the last core, which it
    shares with the router and the client, a 4-bit KV cache and short steps. Threads never outnumber the cores that they
    are pinned to: llama.cpp's spin while they wait, and two on one core slow each other down many times over.
    """
    cores = usable_cores()
    first = cores[:-1][:MAX_DEMO_THREADS] or cores
    fast: dict[str, Any] = {"threads": len(first)}
    small: dict[str, Any] = {"threads": 1, "kv_type": "q4_0", "step_tokens": 8}
    if can_pin():
        fast["cpus"] = _list(first)
        small["cpus"] = _list(cores[-1:])
    return {"fast": fast, "small": small}


def mixed_pair() -> Mapping[str, Mapping[str, Any]]:
    """Settings of two backends of one model with different engines on this machine.

    `llama` is llama.cpp on CPU cores; `mlx` is MLX, on a GPU if it finds one. The cores are shared out in two equal
    parts, of which the last core is kept for the router and the client; of two cores each engine has one, and the last
    is MLX's too: llama.cpp's threads would spin against whoever shares their core.
    """
    cores = usable_cores()
    share = min(max(1, (len(cores) - 1) // 2), MAX_DEMO_THREADS)
    llama: dict[str, Any] = {"engine": "llama_cpp", "threads": share}
    mlx: dict[str, Any] = {"engine": "mlx", "threads": share}
    if can_pin():
        llama["cpus"] = _list(cores[:share])
        mlx["cpus"] = _list(cores[share : 2 * share] or cores)
    return {"llama": llama, "mlx": mlx}


def can_pin() -> bool:
    """Whether this system puts processes on cores."""
    return hasattr(os, "sched_setaffinity")


def stay_on_last_core() -> None:
    """Keep this process, and what it starts from now on, off the cores of the first backend, where that is possible."""
    if can_pin():
        os.sched_setaffinity(0, usable_cores()[-1:])


def flags_of(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings as a command line has them."""
    flags: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            case list():
                flags += [f"--{flag}", ",".join(map(str, value))]
            case _:
                flags += [f"--{flag}", str(value)]
    return tuple(flags)


def usable_cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at this moment."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def _router(options: Mapping[str, Any], targets: Sequence[str]) -> Service:
    flags = [*flags_of(options), *(part for item in targets for part in ("--backend", item))]
    return Service("router", "router_service", tuple(flags), _reachable(options["listen"]))


def _reachable(listen: str) -> str:
    """Where this machine reaches a listening address."""
    host, colon, port = listen.rpartition(":")
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }{colon}{port}"


def _list(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
