"""Plays a backend's schedule forward: when everything there finishes, with and without one more request.

The rules are the backend's own (backend_service.scheduler, step_plan; service_kit.step_time): admission in order of due
time into `max_active` places and free KV cache, a step of one token for each decoding request and fair shares of a
budget for prompts. Between two events (a join, an admission, a first token, a finish) the batch is constant and many
steps are one closed form, so a forecast takes O(requests), not O(tokens).

Exact as far as the inputs are: while the budget of a step is constant (no target time, or a model without
`per_attended_s`) and prompts share it without a remainder. Otherwise steps whose budgets differ by little are played
together, and the rotation of remainders, which no Status shows, may move a first token by a step.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush

from service_kit.step_time import StepModel, fair_shares, prefill_budget

LIKE_BUDGETS = 0.1
"""Steps of a long prompt are played together while the time of a token grows by no more than this share."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request in a backend's books."""

    prefill_tokens: int
    """Prompt tokens to compute before its first token; 0: it decodes already. A waiting one has 1 at least."""
    decode_tokens: int
    """New tokens expected to come still; at least 1."""
    context_tokens: int
    """Tokens in the KV cache for it, or that will be when it is admitted: its reusable prefix."""
    kv_tokens: int
    """What it takes of the KV cache at worst: beyond what it shares, or with padded batches all of it."""
    weight: float = 1.0
    """Of its finish time in the sum."""
    joined_s: float = 0.0
    """When it joins the line, since the start of the schedule."""
    due_s: float = 0.0
    """Since the same moment: the earliest due is admitted first, equals in order of arrival."""


@dataclass(frozen=True, slots=True)
class Line:
    """When a waiting request is due, as the backend's scheduling policy has it."""

    order: str = "fcfs"
    promote_batch_after_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    virtual_s: float = 0.0
    """Of a fair order: where a client begins that has nothing waiting."""
    next_due_s: Mapping[str, float] = field(default_factory=dict)
    """Of a fair order: where the other clients go on, each behind what it has waiting."""

    def due_s(self, joined_s: float, prefill_tokens: int, *, batch: bool, client: str = "") -> float:
        """On the clock of `joined_s`. An unknown policy is taken for first come, first served.

        A fair order's due times are no times: they count seconds of service. They are compared with each other only.
        """
        match self.order:
            case "fair":
                return self.next_due_s.get(client, self.virtual_s)
            case "priority" if batch:
                return joined_s + self.promote_batch_after_s
            case "shortest_prefill_first" if self.prefill_tokens_per_s > 0:
                return joined_s + prefill_tokens / self.prefill_tokens_per_s
            case _:
                return joined_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A backend's books between two steps, which is where the schedule starts."""

    model: StepModel
    max_active: int
    step_tokens: int
    step_target_s: float | None
    free_kv_tokens: int
    """Neither held by an active request nor set aside for its worst case. For padded batches: the whole cache."""
    padded_kv: bool = False
    """A batch takes as many tokens as it has requests, times the longest of them at its worst."""
    line: Line = field(default_factory=Line)
    active: tuple[Job, ...] = ()
    waiting: tuple[Job, ...] = ()
    """In order of admission; those that join later are put in their place then."""
    running_s: float = 0.0
    """The step after the start takes at least so long: it was seen running then."""
    elapsed_s: float = 0.0
    """From the start of the schedule to now, which is when a new request joins."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The active ones, then the waiting ones."""
        return (*self.active, *self.waiting)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one more request can expect, and what it does to the others. Seconds from now."""

    ttft_s: float
    finish_s: float
    delay_of_others_s: float
    """Summed over them by weight: how much later they finish. Rarely negative: another batch may suit them better."""
    last_s: float = 0.0
    """When the last one there finishes, this one included;"""
    last_without_s: float = 0.0
    """and without it."""


def forecast(load: Load, own: Job) -> Forecast:
    """Play the schedule with one more request; `own.joined_s` is `load.elapsed_s`.

    Up to its admission nothing changes for anybody, so the schedule without it forks off there.
    """
    with_own = _Schedule(load, own)
    if not load.active and not load.waiting:
        with_own.run()
        last_s = with_own.now_s - load.elapsed_s
        return Forecast(max(0.0, with_own.own_first_s - load.elapsed_s), last_s, 0.0, last_s, 0.0)
    with_own.run(until_own=True)
    with_own.weighted_finish_s = 0.0
    without = with_own.fork_without_own()
    with_own.run()
    without.run()
    others_s = with_own.weighted_finish_s - own.weight * with_own.own_finish_s
    return Forecast(
        ttft_s=max(0.0, with_own.own_first_s - load.elapsed_s),
        finish_s=max(0.0, with_own.own_finish_s - load.elapsed_s),
        delay_of_others_s=others_s - without.weighted_finish_s,
        last_s=max(0.0, with_own.now_s - load.elapsed_s),
        last_without_s=max(0.0, without.now_s - load.elapsed_s),
    )


def finishes_s(load: Load) -> list[tuple[float, float]]:
    """(first token, finish) of `load.jobs` in their order, from the start of the schedule; a first token that was there
    before counts as 0. For tests, and to look at."""
    schedule = _Schedule(load, None)
    schedule.times = [(0.0, 0.0)] * len(load.jobs)
    schedule.run()
    return schedule.times


def _steps_in(seconds: float, first_s: float, growth_s: float) -> float:
    """n with n * first_s + growth_s * n * (n - 1) / 2 = seconds."""
    if growth_s <= 0:
        return seconds / first_s
    half = first_s - growth_s / 2
    return (math.sqrt(half * half + 2 * growth_s * seconds) - half) / growth_s


@lru_cache(maxsize=1024)
def _row_s(model: StepModel, most: int) -> tuple[float, ...]:
    """Of steps with 0, 1, ... `most` sampled rows: all but what their tokens and contexts take."""
    return tuple(model.base_s + model.per_row_s * rows + model.correction_s(rows) for rows in range(most + 1))


class _Schedule:
    """Where everything stands at the end of a step. Jobs are named by their place in the books; the new one comes last.

    This is the inner loop of every decision, so it keeps to plain numbers and lists.
    """

    __slots__ = (
        "_active_kv",
        "_context",
        "_decoding",
        "_free_kv",
        "_jobs",
        "_joining",
        "_load",
        "_own",
        "_prefilling",
        "_row_s",
        "_running_s",
        "_steps",
        "_waiting",
        "now_s",
        "own_finish_s",
        "own_first_s",
        "times",
        "weighted_finish_s",
    )

    def __init__(self, load: Load, own: Job | None) -> None:
        self._load = load
        self._jobs = load.jobs if own is None else (*load.jobs, own)
        self._own = -1 if own is None else len(self._jobs) - 1
        self.now_s = 0.0
        self.weighted_finish_s = 0.0
        self.own_first_s = self.own_finish_s = 0.0
        self.times: list[tuple[float, float]] | None = None
        self._row_s = _row_s(load.model, load.max_active)
        self._steps = 0
        self._running_s = load.running_s
        self._free_kv = load.free_kv_tokens
        self._active_kv: list[int] = []
        """Of padded batches: each active request's worst case."""
        self._context = 0
        """Tokens in the KV cache, summed over decoding requests."""
        self._decoding: list[tuple[int, int, int]] = []
        """Heap of (step after which it ends, its context then, job)."""
        self._prefilling: list[list[int]] = []
        """[tokens left, context, job], in order of admission."""
        active = len(load.active)
        self._waiting: list[tuple[float, int]] = []
        """(-due, -job): the next is last."""
        self._joining: list[tuple[float, int]] = []
        """(-joins, -job): likewise."""
        for name, job in enumerate(self._jobs):
            if name < active:
                self._start(job, name)
            elif job.joined_s > 0:
                self._joining.append((-job.joined_s, -name))
            else:
                self._waiting.append((-job.due_s, -name))
        self._waiting.sort()
        self._joining.sort()

    def fork_without_own(self) -> _Schedule:
        """The same moment, as if there were no new request."""
        twin: _Schedule = object.__new__(_Schedule)
        twin._load, twin._jobs, twin._own, twin._row_s = self._load, self._jobs, self._own, self._row_s
        twin.now_s, twin.weighted_finish_s, twin.times = self.now_s, self.weighted_finish_s, self.times
        twin.own_first_s, twin.own_finish_s = self.own_first_s, self.own_finish_s
        twin._steps, twin._running_s = self._steps, self._running_s
        twin._free_kv, twin._context = self._free_kv, self._context
        twin._active_kv = list(self._active_kv)
        twin._decoding = list(self._decoding)
        twin._prefilling = [list(prompt) for prompt in self._prefilling]
        twin._waiting = [place for place in self._waiting if place[1] != -self._own]
        twin._joining = [place for place in self._joining if place[1] != -self._own]
        return twin

    def run(self, *, until_own: bool = False) -> None:
        """To the last finish, or until the new request is about to be admitted."""
        max_active = self._load.max_active
        while True:
            while self._joining and -self._joining[-1][0] <= self.now_s:
                name = -self._joining.pop()[1]
                insort(self._waiting, (-self._jobs[name].due_s, -name))
            while self._waiting and len(self._decoding) + len(self._prefilling) < max_active:
                name = -self._waiting[-1][1]
                if not self._fits(self._jobs[name]):
                    break
                if until_own and name == self._own:
                    return
                self._waiting.pop()
                if not self._load.padded_kv:
                    self._free_kv -= self._jobs[name].kv_tokens
                self._start(self._jobs[name], name)
            if self._prefilling:
                self._prefill()
            elif self._decoding:
                self._decode()
            elif self._joining:
                self.now_s = max(self.now_s, -self._joining[-1][0])
                self._running_s = 0.0
            else:
                return

    def _fits(self, job: Job) -> bool:
        """An idle backend takes anything: what could never fit was refused before."""
        if not self._decoding and not self._prefilling:
            return True
        if self._load.padded_kv:
            return (len(self._active_kv) + 1) * max(job.kv_tokens, *self._active_kv) <= self._free_kv
        return job.kv_tokens <= self._free_kv

    def _start(self, job: Job, name: int) -> None:
        if self._load.padded_kv:
            self._active_kv.append(job.kv_tokens)
        if job.prefill_tokens > 0:
            self._prefilling.append([job.prefill_tokens, job.context_tokens, name])
        else:
            self._begin_decode(job.context_tokens, job.decode_tokens, name)

    def _begin_decode(self, context: int, tokens: int, name: int) -> None:
        self._context += context
        heappush(self._decoding, (self._steps + tokens, context + tokens, name))

    def _end(self, name: int) -> None:
        job = self._jobs[name]
        if self._load.padded_kv:
            self._active_kv.remove(job.kv_tokens)
        else:
            self._free_kv += job.kv_tokens
        self.weighted_finish_s += job.weight * self.now_s
        if name == self._own:
            self.own_finish_s = self.now_s
        elif self.times is not None:
            self.times[name] = (self.times[name][0], self.now_s)

    def _decode(self) -> None:
        rows, model = len(self._decoding), self._load.model
        attended_s = model.per_attended_s
        step_s = self._row_s[rows] + model.per_token_s * rows + attended_s * (self._context + rows)
        self._take(step_s, attended_s * rows, self._decoding[0][0] - self._steps)

    def _prefill(self) -> None:
        """One step in which a prompt may end, or several in which none does."""
        load, model, prompts = self._load, self._load.model, self._prefilling
        rows, count = len(self._decoding), len(prompts)
        attended = self._context + rows
        budget = load.step_tokens - rows
        wanted = prompts[0][0] if count == 1 else sum(prompt[0] for prompt in prompts)
        if load.step_target_s is not None:
            contexts = prompts[0][1] if count == 1 else sum(prompt[1] for prompt in prompts)
            decode_s = self._row_s[rows] + model.per_token_s * rows + model.per_attended_s * attended
            budget = prefill_budget(model, budget, load.step_target_s, decode_s, contexts / count)
        budget = max(1, budget)
        if budget >= wanted:
            self._prefill_step(None, attended)
            return
        each = -(-budget // count)
        most = (min(prompt[0] for prompt in prompts) - 1) // each
        if most > 1 and load.step_target_s is not None and model.per_attended_s > 0:
            # Up to where a token takes so much longer that the next budget should be a smaller one.
            like_tokens = LIKE_BUDGETS * (model.per_token_s / model.per_attended_s + prompts[0][1])
            most = max(1, min(most, int(like_tokens / each)))
        if most > 1:
            self._prefill_leap(budget, attended, most)
        else:
            self._prefill_step(fair_shares([prompt[0] for prompt in prompts], budget), attended)

    def _prefill_leap(self, budget: int, attended: float, most: int) -> None:
        """Steps of equal budget in which no prompt ends."""
        model, prompts, rows = self._load.model, self._prefilling, len(self._decoding)
        share = budget / len(prompts)
        attended += sum(share * (prompt[1] + (share + 1) / 2) for prompt in prompts)
        step_s = self._row_s[rows] + model.per_token_s * (rows + budget) + model.per_attended_s * attended
        growth_s = model.per_attended_s * (rows + len(prompts) * share * share)
        tokens = self._take(step_s, growth_s, most) * budget
        for place, prompt in enumerate(prompts):
            part = tokens * (place + 1) // len(prompts) - tokens * place // len(prompts)
            prompt[0] -= part
            prompt[1] += part

    def _prefill_step(self, shares: list[int] | None, attended: float) -> None:
        """One step; without shares it computes all that is left."""
        prompts, model = self._prefilling, self._load.model
        tokens = rows = len(self._decoding)
        for place, prompt in enumerate(prompts):
            left, context, _ = prompt
            share = left if shares is None else shares[place]
            tokens += share
            rows += share == left
            attended += share * (context + (share + 1) / 2)
            prompt[0] = left - share
            prompt[1] = context + share
        self._pass(self._row_s[rows] + model.per_token_s * tokens + model.per_attended_s * attended, 1)
        self._prefilling = [prompt for prompt in prompts if prompt[0]]
        if len(self._prefilling) < len(prompts):
            for left, context, name in prompts:
                if not left:
                    self._first_token(context, name)

    def _first_token(self, context: int, name: int) -> None:
        if name == self._own:
            self.own_first_s = self.now_s
        elif self.times is not None:
            self.times[name] = (self.now_s, 0.0)
        left = self._jobs[name].decode_tokens - 1
        if left > 0:
            self._begin_decode(context, left, name)
        else:
            self._end(name)

    def _take(self, first_s: float, growth_s: float, most: int) -> int:
        """Up to `most` like steps in which no prompt ends: up to a finish, and up to where somebody joins who could
        start. The first takes `first_s`, each later one `growth_s` more than the one before it. Returns how many."""
        if self._running_s > 0:
            most = 1
        elif self._decoding:
            most = min(most, self._decoding[0][0] - self._steps)
        if most > 1 and self._joining and len(self._decoding) + len(self._prefilling) < self._load.max_active:
            left_s = -self._joining[-1][0] - self.now_s
            most = min(most, max(1, int(_steps_in(left_s, max(first_s, 1e-9), growth_s))))
        self._pass(most * first_s + growth_s * (most * (most - 1) / 2), most)
        return most

    def _pass(self, seconds: float, steps: int) -> None:
        self.now_s += max(0.0, seconds, self._running_s)
        self._running_s = 0.0
        self._steps += steps
        decoding = self._decoding
        self._context += steps * len(decoding)
        while decoding and decoding[0][0] <= self._steps:
            _, context, name = heappop(decoding)
            self._context -= context
            self._end(name)
