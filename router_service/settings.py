"""What a router can be told."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from router_service.breaker import BreakerLimits
from router_service.exploration import ExplorationLimits
from router_service.policies.predictive import Objective
from router_service.policies.registry import make_policy
from router_service.stall import STALL_S
from service_kit.faults import InvalidRequest
from service_kit.peers import PeerSettings
from service_kit.state_files import cache_directory

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TARGET = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract):\S+|[^\s:/]+:\d{1,5}|\[[^\s\]]+\]:\d{1,5}")


class RouterSettings(PeerSettings, env_prefix="PHASEROUTE_ROUTER_", cli_prog_name="phaseroute-router"):
    """Sends each request to the backend where it finishes soonest."""

    backend: list[str] = Field(description="name=target of one backend, such as gpu=10.0.0.5:50061; repeat for each")
    policy: str = Field(
        "predictive",
        description="For requests that name none: predictive, predictive_own (its own finish only), two_phase, "
        "round_robin, least_loaded or forced:<backend>",
    )
    output_lengths: Literal["history", "ratio", "budget"] = Field(
        "history",
        description="How long predictive takes answers to become: as long as those of their kind did, a share of "
        "max_new_tokens that falls while answers end early, or all of it",
    )
    keep_lengths: bool = Field(True, description="Keep what was learnt of output lengths over restarts")
    state_dir: Path = Field(
        default_factory=lambda: cache_directory() / "router", description="Where such things are kept"
    )
    batch_weight: float = Field(
        1.0, ge=0, le=1, description="What a second of a batch request counts beside one of an interactive request"
    )
    others_weight: float = Field(
        1.0, ge=0, le=10, description="What the delay of other requests counts beside a request's own time; 0: nothing"
    )
    latest_weight: float = Field(
        1.0, ge=0, le=10, description="What it counts that the last request of all finishes later; 0: nothing"
    )
    explore_after_s: float = Field(
        600.0,
        gt=0,
        description="A backend whose step model is older gets one request that has time to spare, to measure it anew",
    )
    explore_requests: int = Field(
        3, ge=0, le=100, description="Requests with time to spare for a backend that has no measured rates; 0: none"
    )
    probe_timeout_s: float = Field(
        0.05, gt=0, le=10, description="Longest wait for the backends' word on what they have of a prompt"
    )
    status_poll_s: float = Field(
        0.25, gt=0, le=10, description="Between two questions to a backend that cannot push its Status"
    )
    status_silence_s: float = Field(
        5.0, gt=0, description="A backend that says nothing for so long gets no work; a healthy one speaks every second"
    )

    stall_s: float = Field(
        STALL_S,
        gt=0,
        description="A backend that has work and ends no step for so long, and for as long again as its prompts may "
        "take, counts as hung: what runs there goes on elsewhere",
    )
    breaker_failures: int = Field(
        3, ge=1, description="Failures in a row after which a backend gets no work for a while"
    )
    breaker_open_s: float = Field(
        1.0, gt=0, description="The first such while; it doubles each time that the request after it fails as well"
    )
    breaker_max_open_s: float = Field(30.0, gt=0, description="The longest such while; never less than the first")
    max_in_flight: int = Field(
        4096, ge=1, description="Requests at a time; more are refused with RESOURCE_EXHAUSTED, none waits in the router"
    )
    max_in_flight_tokens: int = Field(
        0,
        ge=0,
        description="The same in tokens: prompts as far as they can be estimated, and max_new_tokens; 0: no bound",
    )
    max_attempts: int = Field(4, ge=1, description="Backends that may fail one request before it is given up")
    max_replayed_tokens: int = Field(
        8192, ge=0, description="An answer that breaks off after more tokens is not computed again elsewhere"
    )
    continue_wait_s: float = Field(
        10.0,
        ge=0,
        description="How long an answer that broke off waits for a backend to go on with it, where none is left",
    )

    @property
    def breaker(self) -> BreakerLimits:
        """When a backend that fails is left alone."""
        return BreakerLimits(
            failures=self.breaker_failures,
            open_s=self.breaker_open_s,
            max_open_s=max(self.breaker_open_s, self.breaker_max_open_s),
        )

    @property
    def objective(self) -> Objective:
        """What the predictive policy minimises."""
        return Objective(
            others_weight=self.others_weight,
            latest_weight=self.latest_weight,
            batch_weight=self.batch_weight,
            exploration=ExplorationLimits(per_incarnation=self.explore_requests, old_after_s=self.explore_after_s),
        )

    @property
    def targets(self) -> Mapping[str, str]:
        """gRPC target by backend name."""
        return dict(_split(item) for item in self.backend)

    @field_validator("backend")
    @classmethod
    def _named_once(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("name at least one backend, such as gpu=10.0.0.5:50061")
        names = [_split(item)[0] for item in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is there more than once; give each backend a name of its own")
        return value

    @model_validator(mode="after")
    def _policy_exists(self) -> RouterSettings:
        try:
            make_policy(self.policy, self.targets.keys(), random.Random())
        except InvalidRequest as fault:
            raise ValueError(f"policy: {fault.problem}") from fault
        return self


def _split(item: str) -> tuple[str, str]:
    name, equals, target = item.partition("=")
    if not equals or not _NAME.fullmatch(name) or not _TARGET.fullmatch(target):
        raise ValueError(
            f"{item!r} is not name=target; write a name of letters, digits, '.', '_' or '-', and host:port or unix:path"
        )
    return name, target
