"""Backends in virtual time, and the agenda of what happens when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

from backend_service.request import Event
from backend_service.step_model import KnownStepTimes, StepFit, StepTimes
from service_kit.step_time import StepModel
from simulator.backend import NEVER_S, BackendRules, VirtualBackend
from simulator.profiles import Profile


class Rank(IntEnum):
    """The order of things that happen at the same moment."""

    STEP_ENDS = 0
    INCIDENT = 1
    DEADLINE = 2
    ARRIVAL = 3


class VirtualFleet:
    """Backends by name, driven by one agenda."""

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        *,
        rules: BackendRules,
        models: Mapping[str, StepModel] | None,
        answer_tokens: Callable[[Sequence[int]], int | None],
        hear: Callable[[str, Sequence[Event]], None],
    ) -> None:
        """`models`: by name, to stay what they are; None: fitted anew while steps run. `hear` is told what a backend's
        step brought, when it is over."""
        self.backends = {
            name: VirtualBackend(
                name,
                profile,
                rules=rules,
                make_times=_times(profile, models[name] if models else None),
                answer_tokens=answer_tokens,
            )
            for name, profile in profiles.items()
        }
        self._hear = hear
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.now_s = 0.0

    def at(self, time_s: float, rank: Rank, action: Callable[[], None]) -> None:
        """Put something on the agenda."""
        heapq.heappush(self._agenda, (time_s, rank, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._agenda:
            self.now_s, _, _, action = heapq.heappop(self._agenda)
            action()

    def tell(self, name: str, what: Callable[[VirtualBackend], None]) -> None:
        """Do something to a backend, and keep the agenda right."""
        backend = self.backends[name]
        before_s = backend.wakes_s
        what(backend)
        if backend.wakes_s != before_s:
            self._schedule(backend)

    def _schedule(self, backend: VirtualBackend) -> None:
        due_s = backend.wakes_s
        if due_s != NEVER_S:
            self.at(due_s, Rank.STEP_ENDS, lambda: self._wake(backend, due_s))

    def _wake(self, backend: VirtualBackend, due_s: float) -> None:
        if backend.wakes_s != due_s:  # cut short since, or failed
            return
        events = backend.wake()
        self._schedule(backend)
        self._hear(backend.name, events)


def fitted(profile: Profile) -> StepFit:
    """What a backend of this kind has learned from its calibration."""
    fit = StepFit()
    for shape, seconds in profile.speed.samples(profile.max_active, profile.step_tokens):
        fit.seed(shape, seconds)
    return fit


def step_models(profiles: Mapping[str, Profile]) -> dict[str, StepModel]:
    """By name, what each backend's calibration gives; one fit a kind, since a wide fleet has few kinds. Raises
    `ValueError` for a speed whose samples are too few."""
    kinds: dict[int, StepModel] = {}
    for name, profile in profiles.items():
        if id(profile) not in kinds:
            model = fitted(profile).fit()
            if model is None:
                raise ValueError(f"the speed of {name} gives too few samples for a step model; give 16 or more")
            kinds[id(profile)] = model
    return {name: kinds[id(profile)] for name, profile in profiles.items()}


def _times(profile: Profile, model: StepModel | None) -> Callable[[], StepTimes]:
    """What a new process learns step times with; a known model stays what it is."""
    return (lambda: fitted(profile)) if model is None else (lambda: KnownStepTimes(model))
