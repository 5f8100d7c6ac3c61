"""The best split of a burst over backends, found by playing splits. Simulated: what a router that knew everything,
arrivals to come included, could have got."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from phaseroute.scenarios.planned import Scenario
from simulator.fleet import step_models
from simulator.play import PlayOptions, play
from simulator.profiles import Profile
from simulator.router import AssignedRouter

Split = tuple[str, ...]
"""Backend of each request, in order of arrival."""

EXHAUSTIVE_SPLITS = 1024
"""Up to so many splits all are tried."""
MOST_PLAYS = 1500
"""Of one backend's part; a search that needs more ends with the best so far."""
_OPTIONS = PlayOptions(policy="assigned", learn=False, progress_interval_s=None)


@dataclass(frozen=True, slots=True)
class BestSplit:
    """What was found."""

    assignment: Split
    completion_s: float
    """From the first arrival to the end of the last answer."""
    plays: int
    """Of one backend's part of a split."""
    exhaustive: bool
    """Every split was tried, so that none is better."""


def best_split(
    scenario: Scenario,
    profiles: Mapping[str, Profile],
    *,
    exhaustive_splits: int = EXHAUSTIVE_SPLITS,
    most_plays: int = MOST_PLAYS,
) -> BestSplit:
    """The split with the least completion time; of equal ones the first that was tried. Deterministic.

    Where there are more than `exhaustive_splits`: first by how many requests each backend gets, the earliest, the
    latest, or every so many; then swaps of two requests and moves of one, as long as they help. Raises `ValueError`
    without requests, and when no split that was tried answers them all.
    """
    names, count = tuple(profiles), len(scenario.requests)
    if not count:
        raise ValueError("there is nothing to split: the scenario has no requests")
    search = _Search(scenario, profiles, most_plays)
    exhaustive = len(names) ** count <= exhaustive_splits
    if exhaustive:
        search.improve(itertools.product(names, repeat=count))
    else:
        search.improve(_plain_splits(names, count))
        while search.improve(_swaps(search.best), first=True) or search.improve(_moves(search.best, names), first=True):
            pass
    return search.result(exhaustive=exhaustive)


class _Search:
    """The best split so far. What one backend makes of its part does not depend on the others, so it is played alone,
    once for each part."""

    def __init__(self, scenario: Scenario, profiles: Mapping[str, Profile], most_plays: int) -> None:
        self._scenario = scenario
        self._profiles = profiles
        self._most_plays = most_plays
        self._models = step_models(profiles)
        self._ends_s: dict[tuple[str, tuple[int, ...]], float] = {}
        self.best: Split = ()
        self._best_ends_s = [math.inf]
        """By backend, the latest first: of two splits whose last answers come at the same time, that is better whose
        other backends are done earlier."""

    def improve(self, splits: Iterable[Split], *, first: bool = False) -> bool:
        """Try these; whether one is better than the best before. `first`: stop there."""
        found = False
        for split in splits:
            if len(self._ends_s) >= self._most_plays:
                break
            ends_s = self._try(split)
            if ends_s < self._best_ends_s:
                self.best, self._best_ends_s, found = split, ends_s, True
                if first:
                    break
        return found

    def result(self, *, exhaustive: bool) -> BestSplit:
        if not self.best:
            raise ValueError("no split answers every request; give the backends more KV cache, or allow more plays")
        completion_s = self._best_ends_s[0] - self._scenario.requests[0].at_s
        return BestSplit(self.best, completion_s, len(self._ends_s), exhaustive)

    def _try(self, split: Split) -> list[float]:
        """When each backend is done, the latest first; infinite for all as soon as one is later than the best."""
        ends_s: list[float] = []
        for name in self._profiles:
            part = tuple(index for index, chosen in enumerate(split) if chosen == name)
            end_s = self._end_s(name, part) if part else 0.0
            if end_s > self._best_ends_s[0]:
                return [math.inf]
            ends_s.append(end_s)
        return sorted(ends_s, reverse=True)

    def _end_s(self, name: str, part: tuple[int, ...]) -> float:
        known = self._ends_s.get((name, part))
        if known is None:
            scenario = replace(
                self._scenario,
                requests=tuple(self._scenario.requests[index] for index in part),
                incidents=tuple(incident for incident in self._scenario.incidents if incident.backend == name),
            )
            run = play(
                scenario,
                {name: self._profiles[name]},
                _OPTIONS,
                models=self._models,
                make_router=lambda backends: AssignedRouter(backends, [name] * len(part)),
            ).run
            ok = all(served.ok for served in run.served)
            end_s = max(served.arrived_s + served.finish_s for served in run.served) if ok else math.inf
            known = round(end_s, 9)  # or else the order of additions would decide between equals
            self._ends_s[name, part] = known
        return known


def _plain_splits(names: Sequence[str], count: int) -> Iterator[Split]:
    """Five for each way to share out the number of requests: evenly mixed; in one go after another, either way round;
    and the same with the first request before them all."""
    for bars in itertools.combinations_with_replacement(range(count + 1), len(names) - 1):
        shares = [end - begin for begin, end in itertools.pairwise((0, *bars, count))]
        yield _mixed(names, shares, count)
        blocks = [name for name, share in zip(names, shares, strict=True) for _ in range(share)]
        for split in (blocks, blocks[::-1]):
            yield tuple(split)
            yield (split[-1], *split[:-1])


def _mixed(names: Sequence[str], shares: Sequence[int], count: int) -> Split:
    """Each in turn to who is furthest behind its share."""
    given = [0] * len(names)
    split = []
    for position in range(1, count + 1):
        behind = [share * position / count - got for share, got in zip(shares, given, strict=True)]
        chosen = behind.index(max(behind))
        given[chosen] += 1
        split.append(names[chosen])
    return tuple(split)


def _moves(split: Split, names: Sequence[str]) -> Iterator[Split]:
    """One request goes to another backend."""
    for index, name in itertools.product(range(len(split)), names):
        if split[index] != name:
            yield (*split[:index], name, *split[index + 1 :])


def _swaps(split: Split) -> Iterator[Split]:
    """Two requests change places, neighbours first."""
    for distance in range(1, len(split)):
        for left in range(len(split) - distance):
            right = left + distance
            if split[left] != split[right]:
                swapped = list(split)
                swapped[left], swapped[right] = split[right], split[left]
                yield tuple(swapped)
