import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaseroute.aio import AsyncClient
from phaseroute.burst import Burst, RequestResult, run_burst
from phaseroute.errors import PhaserouteError
from phaseroute.prompts import DistinctPrompts, distinct_prompts, shared_prefix_prompts
from phaseroute.results import Completion, Delta, Finished, Timings, Usage
from tests.clients.fake_service import FakeService


@pytest.fixture
async def client(target: str):
    async with AsyncClient(target) as opened:
        yield opened


async def test_every_request_is_measured_in_order_of_arrival(client: AsyncClient):
    seen: list[tuple[int, Delta | Finished]] = []
    prompts = ("echo a", "echo b c", "echo d e f")
    result = await run_burst(client, Burst(prompts, 0.01, {"backend": "fast"}), lambda *event: seen.append(event))
    assert [request.answer.text for request in result.requests] == ["a", "b c", "d e f"]
    assert [request.backend for request in result.requests] == ["fast"] * 3
    assert result.generated_tokens == 6
    for index, request in enumerate(result.requests):
        assert request.sent_s >= index * 0.01
        assert 0 < request.ttft_s <= request.e2e_s
        assert result.completion_s >= request.sent_s + request.e2e_s
        assert len(request.token_times_s) == len(request.answer.token_ids) == index + 1
        assert request.ttft_s == request.token_times_s[0] <= request.token_times_s[-1] <= request.e2e_s
        assert sum(isinstance(event, Finished) for number, event in seen if number == index) == 1


async def test_every_decision_is_found(client: AsyncClient):
    result = await run_burst(client, Burst(("echo a",) * 5, 0.0, {}), lambda *_: None)
    decided = [request.decision.id for request in result.requests if request.decision]
    assert decided == [request.decision_id for request in result.requests]
    assert len(set(decided)) == 5


async def test_the_first_failure_ends_the_burst_and_its_calls(client: AsyncClient, service: FakeService):
    with pytest.raises(PhaserouteError, match="queue is full"):
        await run_burst(client, Burst(("hang", "busy"), 0.05, {}), lambda *_: None)
    assert service.ended.wait(10)


def request_with(token_times_s: tuple[float, ...], e2e_s: float) -> RequestResult:
    """A request whose tokens came then."""
    count = len(token_times_s)
    answer = Completion("", (1,) * count, "length", Usage(1, 0, count), Timings(0, 0, 0), None)
    return RequestResult(0.0, token_times_s[0] if count else e2e_s, e2e_s, token_times_s, answer, None)


def test_tokens_of_one_message_share_its_time():
    request = request_with((1.0, 1.5, 2.5, 2.5, 2.75), 3.0)
    assert request.gaps_s == pytest.approx((0.5, 0.5, 0.5, 0.25))
    assert request.mean_gap_s == pytest.approx(0.5)
    assert request.max_gap_s == pytest.approx(1.0)


def test_tokens_that_come_with_the_first_one_do_not_wait_for_it():
    assert request_with((1.0, 1.0, 1.0, 1.5), 1.5).gaps_s == pytest.approx((0.0, 0.0, 0.5))


@pytest.mark.parametrize("token_times_s", [(), (1.0,)])
def test_fewer_than_two_tokens_have_no_time_between_them(token_times_s):
    request = request_with(token_times_s, 2.0)
    assert (request.gaps_s, request.mean_gap_s, request.max_gap_s) == ((), None, None)


@given(st.lists(st.integers(0, 50), min_size=1).map(sorted))
def test_inter_token_latencies_add_up_to_the_time_between_first_and_last(times):
    request = request_with(tuple(map(float, times)), float(times[-1]))
    assert len(request.gaps_s) == len(times) - 1
    assert sum(request.gaps_s) == pytest.approx(times[-1] - times[0])


class CountsWords:
    """Stands for a client whose server has one token a word and a template of 7 tokens."""

    async def probe(self, prompt):
        words = len(prompt.split()) if isinstance(prompt, str) else sum(len(turn["content"].split()) for turn in prompt)
        return type("Probe", (), {"prompt_tokens": words + 7})


@pytest.mark.parametrize("size", [1, 60, 516, 2000])
async def test_prompts_have_the_size_asked_for_and_differ_only_at_the_end(size: int):
    prompts = await shared_prefix_prompts(CountsWords(), size)  # type: ignore[arg-type]
    made = [prompts.next() for _ in range(20)]
    assert len({turns[1]["content"] for turns in made}) == 20
    assert len({turns[0]["content"] for turns in made}) == 1
    sizes = [(await CountsWords().probe(turns)).prompt_tokens for turns in made]
    smallest_possible = 17
    assert all(abs(found - max(size, smallest_possible)) <= 3 for found in sizes)


@pytest.mark.parametrize("size", [1, 60, 516, 2000])
async def test_distinct_prompts_have_the_size_asked_for_and_no_first_token_in_common(size: int):
    prompts = await distinct_prompts(CountsWords(), size)  # type: ignore[arg-type]
    made = [str(prompts.next()) for _ in DistinctPrompts.OPENINGS]
    assert len({text[0] for text in made}) == len(made)
    sizes = {(await CountsWords().probe(text)).prompt_tokens for text in made}
    smallest_possible = 8
    assert sizes == {max(size, smallest_possible)}
    assert len({tuple(sorted(text.split()[1:])) for text in made}) == 1


def test_distinct_prompts_never_come_again_unless_asked_to():
    words = [str(number) for number in range(20)]
    made = [DistinctPrompts(words, random.Random(seed)) for seed in (1, 1, 2)]
    again, same, other = ([prompts.next() for _ in range(300)] for prompts in made)
    assert again == same
    assert len({*again, *other}) == 600
