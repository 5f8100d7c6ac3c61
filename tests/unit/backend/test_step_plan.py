"""What a step is made of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.base import Admission
from backend_service.request import Request
from backend_service.step_plan import StepLimits, StepPlanner
from backend_service.text import TextStream
from service_kit.requests import Sampling
from service_kit.step_time import StepModel, fair_shares

MODEL = StepModel(base_s=0.0, per_token_s=0.01, per_row_s=0.0, per_attended_s=0.00001, samples=99, residual_p90_s=0.0)


def active(handle, prompt_tokens, computed, generated=0, max_new_tokens=10):
    request = Request(
        id=str(handle),
        tokens=range(prompt_tokens),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(),
        ignore_eos=True,
        text=TextStream([b"x"] * 10),
        eos=frozenset(),
        reusable_estimate=0,
        submitted_s=0.0,
    )
    request.admit(Admission(handle, 0), 0.0)
    for _ in range(generated):
        request.accept(1, 0.0)
    request.computed_tokens = prompt_tokens + generated - 1 if generated else computed
    return request


def prompts(slices):
    return {piece.handle: piece.tokens for piece in slices if piece.tokens > 1}


def test_nothing_active_is_no_step():
    assert StepPlanner(StepLimits()).plan([], None) == []


def test_each_decoding_request_gets_its_token_before_any_prompt():
    requests = [active(0, 500, 0), active(1, 20, 20, generated=3), active(2, 20, 20, generated=1)]
    slices = StepPlanner(StepLimits(step_tokens=64)).plan(requests, None)
    assert [(piece.handle, piece.tokens) for piece in slices] == [(1, 1), (2, 1), (0, 62)]


def test_the_time_target_shrinks_the_budget_as_contexts_grow():
    planner = StepPlanner(StepLimits(step_tokens=512, step_target_s=0.5))
    early = planner.plan([active(0, 4000, 0)], MODEL)[0].tokens
    late = planner.plan([active(0, 4000, 3000)], MODEL)[0].tokens
    assert early == 50  # 0.5 s at 0.01 s a token
    assert late == 12  # each costs 0.03 s more behind 3,000 others


def test_the_time_of_decode_rows_comes_out_of_the_target():
    planner = StepPlanner(StepLimits(step_tokens=512, step_target_s=0.5))
    decoding = [active(handle, 20, 20, generated=1) for handle in range(1, 11)]
    (prompt,) = prompts(planner.plan([active(0, 4000, 0), *decoding], MODEL)).values()
    assert prompt == 39  # ten rows of 0.01 s, and a little for their contexts


def test_decode_rows_cannot_starve_a_prompt():
    planner = StepPlanner(StepLimits(step_tokens=512, step_target_s=0.5))
    decoding = [active(handle, 20, 20, generated=1) for handle in range(1, 65)]
    slices = planner.plan([active(0, 4000, 0), *decoding], MODEL)
    assert prompts(slices) == {0: 25}  # the rows alone take 0.65 s; half of the target is left for the prompt


def test_a_prompt_always_proceeds():
    planner = StepPlanner(StepLimits(step_tokens=512, step_target_s=0.001))
    assert planner.plan([active(0, 4000, 3000)], MODEL)[0].tokens == 1


def test_the_remainder_goes_to_another_prompt_each_time():
    planner = StepPlanner(StepLimits(step_tokens=65))
    shares = [
        {piece.handle: piece.tokens for piece in planner.plan([active(0, 500, 0), active(1, 500, 0)], None)}
        for _ in range(2)
    ]
    assert shares == [{0: 32, 1: 33}, {0: 33, 1: 32}]


def test_guesses_end_where_the_request_ends():
    planner = StepPlanner(StepLimits(step_tokens=64, guesses=4))
    early, late, last = (active(0, 20, 20, generated=count) for count in (2, 8, 9))
    assert [planner.plan([request], None)[0].guesses for request in (early, late, last)] == [4, 1, 0]


@given(
    step_tokens=st.integers(8, 64),
    guesses=st.integers(0, 16),
    decoding=st.integers(0, 4),
    prefilling=st.integers(0, 4),
)
def test_no_step_is_larger_than_its_bound(step_tokens, guesses, decoding, prefilling):
    requests = [active(handle, 20, 20, generated=1, max_new_tokens=50) for handle in range(decoding)]
    requests += [active(10 + handle, 300, 0) for handle in range(prefilling)]
    slices = StepPlanner(StepLimits(step_tokens, guesses=guesses)).plan(requests, None)
    assert sum(piece.tokens + piece.guesses for piece in slices) <= step_tokens
    assert {piece.handle for piece in slices if piece.tokens == 1 and piece.handle < 10} == set(range(decoding))


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 200))
def test_fair_shares(wanted, budget):
    shares = fair_shares(wanted, budget)
    assert sum(shares) == min(budget, sum(wanted))
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    unmet = [share for share, want in zip(shares, wanted, strict=True) if share < want]
    if unmet:  # nobody got more than one token above whoever was left wanting
        assert max(shares) <= min(unmet) + 1
