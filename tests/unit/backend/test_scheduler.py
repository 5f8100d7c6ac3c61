"""The scheduler over the simulated engine in virtual time, and over a broken one."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest

from backend_service.concurrency import Choice
from backend_service.engines.base import Slice, StepResult
from backend_service.engines.simulated import SimulatedEngine, SimulatedSpeed
from backend_service.kv_pool import PoolLimits
from backend_service.request import Ended, Event, Failed, FinishReason, Phase, Progress, Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.step_model import StepFit
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from service_kit.faults import EngineFailed
from service_kit.requests import Sampling, TextPrompt
from simulator.clock import VirtualClock


class RecordingEngine(SimulatedEngine):
    """Keeps every step's slices, and breaks on demand."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps: list[list[Slice]] = []
        self.break_next = False

    def step(self, slices):
        self.steps.append(list(slices))
        if self.break_next:
            self.break_next = False
            self._pool.clear()
            self._sequences.clear()
            raise EngineFailed("broken on purpose")
        return super().step(slices)


@dataclass
class Bench:
    """A scheduler with everything around it."""

    max_active: int = 4
    step_tokens: int = 64
    capacity: int = 4096
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self):
        speed = SimulatedSpeed(1000, {1: 0.01, 4: 0.04})
        limits = PoolLimits(self.capacity, max_live=self.max_active)
        self.engine = RecordingEngine(speed, limits, sleep=self.clock.sleep)
        self.scheduler = Scheduler(
            self.engine, SchedulerLimits(self.max_active, StepLimits(self.step_tokens)), clock=self.clock
        )
        self.events: list[Event] = []

    def submit(self, name, prompt=None, max_new_tokens=8, *, ignore_eos=True, stop=(), reusable=0):
        vocabulary = self.engine.info.vocabulary
        request = Request(
            id=name,
            tokens=self.engine.prepare(TextPrompt(prompt or (name * 100)[:100])),
            max_new_tokens=max_new_tokens,
            sampling=Sampling(),
            ignore_eos=ignore_eos,
            text=TextStream(vocabulary.pieces, stop),
            eos=vocabulary.eos,
            reusable_estimate=reusable,
            submitted_s=self.clock(),
        )
        self.scheduler.submit(request)

    def run(self, ticks=None):
        while self.scheduler.busy and ticks != 0:
            self.events += self.scheduler.tick()
            self.engine.check_integrity()
            ticks = None if ticks is None else ticks - 1
        return self

    def tokens(self, name):
        mine = (event for event in self.events if isinstance(event, Progress) and event.request_id == name)
        return [token for event in mine for token in event.token_ids]

    def text(self, name):
        return "".join(e.text for e in self.events if isinstance(e, Progress) and e.request_id == name)

    def end(self, name):
        (end,) = (e for e in self.events if isinstance(e, Ended | Failed) and e.request_id == name)
        return end

    def phases(self):
        return {view.id: view.phase for view in self.scheduler.snapshot().requests}


def test_one_request_runs_to_its_length():
    bench = Bench()
    bench.submit("a")
    bench.run()
    end = bench.end("a")
    assert end.reason is FinishReason.LENGTH
    assert (end.prompt_tokens, end.cached_tokens, end.generated_tokens) == (100, 0, 8)
    assert len(bench.tokens("a")) == 8
    assert not bench.scheduler.busy
    assert bench.scheduler.snapshot().requests == ()


def test_times_are_the_clocks():
    bench = Bench()
    bench.submit("a")
    bench.run()
    times = bench.end("a").times
    assert times.submitted_s == times.admitted_s == 0
    assert times.first_token_s == pytest.approx(0.1)  # 100 prompt tokens at 1000/s
    assert times.last_token_s == pytest.approx(0.1 + 7 * 0.01)


def test_decode_rows_are_in_every_step_while_a_long_prompt_is_prefilled():
    bench = Bench(step_tokens=16)
    bench.submit("stream", prompt="s" * 10, max_new_tokens=50)
    bench.run(ticks=2)
    assert bench.phases() == {"stream": Phase.DECODE}
    bench.submit("long", prompt="l" * 300, max_new_tokens=2)
    bench.run(ticks=15)
    assert bench.phases()["long"] is Phase.PREFILL
    for step in bench.engine.steps[2:]:
        sizes = sorted(piece.tokens for piece in step)
        assert sizes == [1, 15]  # the stream's row, and the rest of the budget


def test_prompts_share_the_budget_fairly():
    bench = Bench(step_tokens=60)
    for name in "abc":
        bench.submit(name, prompt=name * 90)
    bench.run(ticks=1)
    assert [piece.tokens for piece in bench.engine.steps[0]] == [20, 20, 20]


def test_no_step_exceeds_its_budget_by_more_than_the_decode_rows():
    bench = Bench(step_tokens=8)
    for name in "abcdef":
        bench.submit(name, prompt=name * 50, max_new_tokens=6)
    bench.run()
    assert max(sum(piece.tokens for piece in step) for step in bench.engine.steps) <= 8


def test_queue_is_first_in_first_out_and_bounded_by_max_active():
    bench = Bench(max_active=2)
    for name in "abcd":
        bench.submit(name)
    bench.run(ticks=1)
    assert list(bench.phases()) == ["a", "b", "c", "d"]
    assert Counter(bench.phases().values())[Phase.QUEUED] == 2
    bench.run()
    ends = [e.request_id for e in bench.events if isinstance(e, Ended)]
    assert ends == ["a", "b", "c", "d"]


def test_the_head_waits_for_room_and_nobody_overtakes_it():
    bench = Bench(capacity=512)
    bench.submit("first", prompt="f" * 200, max_new_tokens=100)
    bench.submit("big", prompt="b" * 300, max_new_tokens=100)
    bench.submit("small", prompt="s" * 10, max_new_tokens=2)
    bench.run(ticks=3)
    phases = bench.phases()
    assert phases["first"] is not Phase.QUEUED
    assert (phases["big"], phases["small"]) == (Phase.QUEUED, Phase.QUEUED)
    bench.run()
    assert {e.request_id for e in bench.events if isinstance(e, Ended)} == {"first", "big", "small"}


def test_queued_request_keeps_the_estimate_it_was_routed_with():
    bench = Bench(max_active=1)
    bench.submit("active")
    bench.submit("queued", prompt="q" * 100, reusable=96)
    bench.run(ticks=1)
    view = bench.scheduler.snapshot().requests[1]
    assert (view.phase, view.remaining_prefill_tokens, view.remaining_decode_tokens) == (Phase.QUEUED, 4, 8)


def test_prefix_of_a_running_request_is_shared():
    bench = Bench()
    bench.submit("first", prompt="x" * 100 + "1" * 10, max_new_tokens=50)
    bench.run(ticks=3)
    bench.submit("second", prompt="x" * 100 + "2" * 10)
    bench.run()
    assert bench.end("second").cached_tokens == 100


def test_prefix_of_a_finished_request_is_shared_and_one_token_is_always_computed():
    bench = Bench()
    bench.submit("first", "p" * 100)
    bench.run()
    bench.submit("again", "p" * 100)
    bench.run()
    assert bench.end("again").cached_tokens == 99
    assert bench.tokens("again") == bench.tokens("first")


@pytest.mark.parametrize("ticks", [0, 1, 4])
def test_cancel_reaches_queued_prefilling_and_decoding_requests(ticks):
    bench = Bench(max_active=1, step_tokens=40)
    bench.submit("victim")
    bench.submit("next")
    bench.run(ticks=ticks)
    expected = {0: Phase.QUEUED, 1: Phase.PREFILL, 4: Phase.DECODE}[ticks]
    assert bench.phases()["victim"] is expected
    bench.scheduler.cancel("victim")
    assert "victim" not in bench.phases()
    bench.run(ticks=1)
    assert bench.phases()["next"] is not Phase.QUEUED  # the slot is free one step later
    bench.run()
    assert bench.end("next").reason is FinishReason.LENGTH


def test_cancelled_prefill_stays_reusable():
    bench = Bench(step_tokens=40)
    bench.submit("victim", "p" * 100)
    bench.run(ticks=2)
    bench.scheduler.cancel("victim")
    bench.submit("same", "p" * 100)
    bench.run()
    assert bench.end("same").cached_tokens == 80


def test_cancel_of_an_unknown_request_is_ignored():
    bench = Bench()
    bench.scheduler.cancel("nobody")
    bench.submit("a")
    bench.run()
    assert bench.end("a").reason is FinishReason.LENGTH


def test_stop_string_ends_the_request_and_is_not_shown():
    free = Bench()
    free.submit("a", max_new_tokens=40)
    free.run()
    stop = free.text("a")[10:13]
    bench = Bench()
    bench.submit("a", max_new_tokens=40, stop=(stop,))
    bench.run()
    assert bench.end("a").reason is FinishReason.STOP
    assert bench.text("a") == free.text("a")[: free.text("a").index(stop)]


def test_eos_ends_the_request_unless_ignored():
    prompt = next(p for p in (f"prompt {n}" for n in range(50)) if _ends_early(p))
    bench = Bench()
    bench.submit("free", prompt=prompt, max_new_tokens=500, ignore_eos=False)
    bench.run()
    end = bench.end("free")
    assert end.reason is FinishReason.EOS
    assert end.generated_tokens == len(bench.tokens("free")) < 500
    bench.submit("forced", prompt=prompt, max_new_tokens=500, ignore_eos=True)
    bench.run()
    assert bench.end("forced").generated_tokens == 500


def _ends_early(prompt):
    bench = Bench()
    bench.submit("a", prompt=prompt, max_new_tokens=500, ignore_eos=False)
    bench.run()
    return bench.end("a").reason is FinishReason.EOS


def test_broken_step_fails_the_active_requests_and_spares_the_queued_ones():
    bench = Bench(max_active=2)
    for name in "abc":
        bench.submit(name)
    bench.engine.break_next = True
    bench.run()
    assert isinstance(bench.end("a"), Failed)
    assert isinstance(bench.end("b"), Failed)
    assert bench.end("c").reason is FinishReason.LENGTH


def test_sequence_grows_with_every_change_and_structure_only_with_arrivals_phases_and_ends():
    bench = Bench()
    seen = [bench.scheduler.snapshot()]
    bench.submit("a", max_new_tokens=4)
    while bench.scheduler.busy:
        bench.run(ticks=1)
        seen.append(bench.scheduler.snapshot())
    assert all(before.sequence < after.sequence for before, after in itertools.pairwise(seen))
    steps = [after.structure - before.structure for before, after in itertools.pairwise(seen)]
    # submit and admit; first token; second and third; last one leaves
    assert steps == [2, 1, 0, 0, 1]


def test_output_does_not_depend_on_batch_or_chunks():
    prompts = {name: f"{name * 30} tell me more" for name in "abcd"}
    alone = {}
    for name, prompt in prompts.items():
        bench = Bench(step_tokens=512)
        bench.submit(name, prompt=prompt, max_new_tokens=20)
        alone[name] = bench.run().tokens(name)
    together = Bench(step_tokens=7)
    for name, prompt in prompts.items():
        together.submit(name, prompt=prompt, max_new_tokens=20)
    together.run()
    assert {name: together.tokens(name) for name in prompts} == alone


class Slowing:
    """Chooses what it is told to."""

    def __init__(self, *sizes):
        self.sizes = list(sizes)
        self.contexts = []

    def update(self, model, context_tokens, now_s):
        self.contexts.append(context_tokens)
        return Choice(self.sizes.pop(0) if len(self.sizes) > 1 else self.sizes[0], "auto: as told")


def chosen(bench, *sizes):
    """The bench with a scheduler whose batch size is chosen."""
    bench.scheduler = Scheduler(
        bench.engine, SchedulerLimits(4, StepLimits(64)), clock=bench.clock, concurrency=Slowing(*sizes)
    )
    return bench


def test_a_smaller_batch_ends_nobody_and_admits_nobody_until_there_is_room():
    bench = chosen(Bench(), 4, 1)
    for name in "abcde":
        bench.submit(name, max_new_tokens=60 if name < "e" else 2)
    bench.run(ticks=5)
    assert [view.id for view in bench.scheduler.snapshot().active] == ["a", "b", "c", "d"]
    bench.run()
    assert bench.scheduler.snapshot().max_active == 1
    assert all(isinstance(bench.end(name), Ended) for name in "abcde")
    last_of_the_four = max(bench.end(name).times.last_token_s for name in "abcd")
    assert bench.end("e").times.admitted_s >= last_of_the_four


def test_a_larger_batch_admits_more():
    bench = chosen(Bench(), 1, 3)
    for name in "abcd":
        bench.submit(name, max_new_tokens=300)
    bench.run(ticks=3)
    assert len(bench.scheduler.snapshot().active) == 1
    while len(bench.scheduler.snapshot().active) < 3:
        bench.run(ticks=1)
        assert bench.clock() < 5, "the new batch size is not heeded"
    snapshot = bench.scheduler.snapshot()
    assert (snapshot.max_active, snapshot.max_active_reason) == (3, "auto: as told")


def test_no_choice_exceeds_what_the_engine_was_built_for():
    assert chosen(Bench(), 9).scheduler.snapshot().max_active == 4


def test_a_set_batch_needs_no_reason():
    snapshot = Bench(max_active=3).scheduler.snapshot()
    assert (snapshot.max_active, snapshot.max_active_reason) == (3, "")


def test_the_snapshot_knows_how_old_the_step_model_is():
    bench = Bench()
    assert bench.scheduler.snapshot().measured_s is None
    bench.submit("a", max_new_tokens=300)
    bench.run()
    snapshot = bench.scheduler.snapshot()
    assert snapshot.step_model is not None
    assert bench.clock() - 1.1 < snapshot.measured_s <= bench.clock()


def test_a_leap_counts_as_one_of_its_steps():
    """In virtual time an engine may run several decode steps at once."""
    seen = []

    class Recording(StepFit):
        def observe(self, shape, seconds, at_s=None):
            seen.append((shape, seconds))

    class Leaping(RecordingEngine):
        def step(self, slices):
            first = super().step(slices)
            if slices[0].tokens > 1:
                return first
            results = [first]
            for _ in range(4):
                results.append(super().step(slices))
            tokens = {
                piece.handle: [token for each in results for token in each.tokens[piece.handle]] for piece in slices
            }
            return StepResult(tokens, steps=len(results))

    bench = Bench()
    bench.engine = Leaping(
        SimulatedSpeed(1000, {1: 0.01, 4: 0.04}), PoolLimits(4096, max_live=4), sleep=bench.clock.sleep
    )
    bench.scheduler = Scheduler(bench.engine, SchedulerLimits(4), clock=bench.clock, fit=Recording())
    bench.submit("a", prompt="p" * 100, max_new_tokens=11)
    bench.run()
    assert bench.end("a").generated_tokens == 11
    _, first, second = seen
    assert [shape.tokens for shape, _ in (first, second)] == [1, 1]
    assert [shape.attended for shape, _ in (first, second)] == [103, 108]  # 101 to 105, then 106 to 110
    assert [seconds for _, seconds in (first, second)] == pytest.approx([0.01, 0.01], rel=0.05)


def test_step_target_bounds_steps_once_the_step_time_is_known():
    bench = Bench(step_tokens=400)
    bench.scheduler = Scheduler(
        bench.engine, SchedulerLimits(4, StepLimits(400, step_target_s=0.05)), clock=bench.clock
    )
    bench.submit("learn", prompt="l" * 2000, max_new_tokens=200)
    bench.run()
    known = len(bench.engine.steps)
    bench.submit("bounded", prompt="b" * 1000, max_new_tokens=2)
    bench.run()
    chunks = [piece.tokens for step in bench.engine.steps[known:] for piece in step if piece.tokens > 1]
    assert max(chunks) == pytest.approx(50, abs=5)  # 1000 tokens/s for 0.05 s
