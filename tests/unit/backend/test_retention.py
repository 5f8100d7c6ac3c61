"""The order in which retained sequences give way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backend_service.retention import SHARED_FOR_PLACEMENTS, Retention


def released(retention, seq, *, prompt, output=0, shared=0, owners=()):
    retention.start(seq, prompt_tokens=prompt, shared_tokens=shared, owners=owners)
    retention.retain(seq, prompt + output)


def parts_in_order(retention):
    """Cut part after part until nothing is left."""
    parts = []
    while retention.retained:
        seq, keep = retention.weakest_part()
        parts.append((seq, keep))
        if keep:
            retention.truncate(seq, keep)
        else:
            retention.forget(seq)
    return parts


def test_outputs_go_first_then_prompts_then_what_was_shared():
    retention = Retention()
    released(retention, 0, prompt=100, output=20)
    released(retention, 1, prompt=90, output=30, shared=50, owners=[0])
    released(retention, 2, prompt=40)
    released(retention, 3, prompt=60, output=5)
    assert parts_in_order(retention) == [
        *[(0, 100), (1, 90), (3, 60)],
        *[(0, 50), (1, 50), (2, 0), (3, 0)],
        *[(0, 0), (1, 0)],
    ]


def test_the_last_use_of_a_shared_prefix_is_a_start_from_it():
    retention = Retention()
    released(retention, 0, prompt=100)
    released(retention, 1, prompt=100, shared=80, owners=[0])
    released(retention, 2, prompt=100)
    released(retention, 3, prompt=100, shared=90, owners=[2])
    released(retention, 4, prompt=70, shared=60, owners=[0, 1])
    assert parts_in_order(retention) == [
        *[(0, 80), (1, 80), (2, 90), (3, 90), (4, 60)],
        *[(2, 0), (3, 0), (0, 0), (1, 0), (4, 0)],
    ]


def test_an_answer_that_somebody_went_on_from_is_part_of_a_prompt():
    retention = Retention()
    released(retention, 0, prompt=50, output=40)
    released(retention, 1, prompt=30, output=10)
    released(retention, 2, prompt=95, output=7, shared=80, owners=[0])
    assert retention.prompt_tokens(0) == 80
    assert parts_in_order(retention)[:3] == [(0, 80), (1, 30), (2, 95)]


def test_what_was_shared_long_ago_is_an_ordinary_prompt():
    retention = Retention()
    released(retention, 0, prompt=50, output=40)
    released(retention, 1, prompt=100, shared=70, owners=[0])
    for seq in range(2, SHARED_FOR_PLACEMENTS + 1):
        retention.start(seq, prompt_tokens=1, shared_tokens=0, owners=[])
    assert retention.weakest_part() == (0, 70)
    retention.truncate(0, 70)
    retention.truncate(1, 70)
    retention.retain(2, 1)
    assert retention.weakest_part() == (2, 0)
    retention.start(99, prompt_tokens=1, shared_tokens=0, owners=[])
    assert retention.weakest_part() == (0, 0)


def test_a_shorter_start_keeps_only_so_much_fresh():
    retention = Retention()
    released(retention, 0, prompt=100)
    retention.start(1, prompt_tokens=90, shared_tokens=80, owners=[0])
    for seq in range(2, SHARED_FOR_PLACEMENTS + 1):
        retention.start(seq, prompt_tokens=40, shared_tokens=30, owners=[0])
    assert retention.weakest_part() == (0, 80)
    retention.start(99, prompt_tokens=40, shared_tokens=30, owners=[0])
    assert retention.weakest_part() == (0, 30)


def test_a_handle_is_taken_from_who_loses_least():
    retention = Retention()
    sole = {0: 100, 1: 60, 2: 20, 3: 0, 4: 0}
    released(retention, 0, prompt=100)
    released(retention, 1, prompt=100, shared=50, owners=[])
    released(retention, 2, prompt=80, output=20)
    released(retention, 3, prompt=100, shared=50, owners=[])
    released(retention, 4, prompt=100)
    order = []
    while retention.retained:
        order.append(retention.weakest_sequence(sole.__getitem__))
        retention.forget(order[-1])
    assert order == [3, 4, 2, 0, 1]


@given(
    prompt=st.integers(1, 20),
    output=st.integers(0, 20),
    starts=st.lists(st.integers(0, 40), max_size=3 * SHARED_FOR_PLACEMENTS),
)
def test_parts_begin_where_the_uses_say(prompt, output, starts):
    tokens = prompt + output
    starts = [min(start, tokens) for start in starts]
    retention = Retention()
    released(retention, 0, prompt=prompt, output=output)
    for seq, shared in enumerate(starts, 1):
        retention.start(seq, prompt_tokens=99, shared_tokens=shared, owners=[0])
    shared = max(starts[-SHARED_FOR_PLACEMENTS:], default=0)
    begins = {0, shared, max([prompt, *starts])} - {tokens}
    assert parts_in_order(retention) == [(0, begin) for begin in sorted(begins, reverse=True)]
