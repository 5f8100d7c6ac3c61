"""What is benchmarked: a router and its backends, or one backend without a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from phaseroute.aio import AsyncClient
from phaseroute.bench.prompts import ScenarioPrompts
from phaseroute.errors import PhaserouteError
from phaseroute.requests import GenerateOptions
from phaseroute.v1 import inference_pb2, router_pb2

IDLE_WAIT_S = 5.0
"""How long a fleet may take to fall idle: somebody else may use it too."""
WARM_TIMEOUT_S = 300.0
"""For one prefix on one backend."""
DIRECT = "direct"
"""Stands for a policy where no router decides."""


@dataclass(frozen=True, slots=True)
class Member:
    """A backend as it was when the benchmark began."""

    name: str
    status: inference_pb2.BackendStatus


@dataclass(frozen=True, slots=True)
class Fleet:
    """Who will serve."""

    members: tuple[Member, ...]
    routed: bool
    """False: one backend is asked without a router, and neither policies nor pins mean anything."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the backends, in the router's order."""
        return tuple(member.name for member in self.members)

    @property
    def simulated(self) -> bool:
        """In some of them no model runs."""
        return any(member.status.engine.simulated for member in self.members)


async def find_fleet(client: AsyncClient) -> Fleet:
    """Who serves behind this client. Raises `PhaserouteError`: nobody is there, or no backend serves."""
    try:
        entries = await client.backends()
    except PhaserouteError as error:
        if error.code is not grpc.StatusCode.UNIMPLEMENTED:
            raise
        status = await client.status()
        return Fleet((Member(status.engine.name, status),), routed=False)
    members = tuple(
        Member(entry.name, entry.status) for entry in entries if entry.state == router_pb2.BACKEND_STATE_SERVING
    )
    if not members:
        raise PhaserouteError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"The router at {client.target} has no serving backend. `phaseroute backends` says why; start one.",
        )
    return Fleet(members, routed=True)


async def check_policies(client: AsyncClient, policies: Sequence[str]) -> None:
    """Ask the router about each, sending nothing. Raises its `PhaserouteError` that lists what there is."""
    for policy in policies:
        try:
            await client.route([0], policy=policy, max_new_tokens=1)
        except PhaserouteError as error:
            if error.field == "routing.policy":
                raise
            # It knows the policy; that nobody could take this request now is no matter here.


async def warm(client: AsyncClient, fleet: Fleet, prompts: ScenarioPrompts, tell: Callable[[str], None]) -> None:
    """Have every backend hold the scenario's warm prefixes: each is sent twice, to have it and to see that it is there.
    What a backend could not hold, and a backend that fails, is told; the play shows what comes of it."""
    for member in fleet.members:
        try:
            for attempt in range(2):
                for prompt in prompts.warm_prompts(attempt):
                    options = GenerateOptions(max_new_tokens=1, ignore_eos=True)
                    if fleet.routed:
                        options["backend"] = member.name
                    usage = (await client.complete(prompt, timeout_s=WARM_TIMEOUT_S, **options)).usage
                    if attempt and usage.cached_tokens < len(prompt) - 1:
                        tell(f"{member.name} holds only {usage.cached_tokens} of {len(prompt) - 1} warm tokens")
        except PhaserouteError as error:
            tell(f"{member.name} could not be warmed: {error}")


async def until_idle(client: AsyncClient, fleet: Fleet, tell: Callable[[str], None]) -> None:
    """Until no request is known anywhere, within reason. Raises `PhaserouteError` when nobody answers any more."""
    try:
        async with asyncio.timeout(IDLE_WAIT_S):
            while await _busy(client, fleet):
                pass  # a call a time: a Status is 50 ms late at most
    except TimeoutError:
        tell(f"the fleet was not idle within {IDLE_WAIT_S:.0f} s; somebody else may use it")


async def _busy(client: AsyncClient, fleet: Fleet) -> bool:
    if not fleet.routed:
        return bool((await client.status()).requests)
    return any(
        entry.booked_requests or (entry.status.requests and entry.state != router_pb2.BACKEND_STATE_UNREACHABLE)
        for entry in await client.backends()
    )
