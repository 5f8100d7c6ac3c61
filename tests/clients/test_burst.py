import pytest

from phaseroute.aio import AsyncClient
from phaseroute.burst import Burst, run_burst
from phaseroute.errors import PhaserouteError
from phaseroute.prompts import shared_prefix_prompts
from phaseroute.results import Delta, Finished
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


class CountsWords:
    """Stands for a client whose server has one token a word and a template of 7 tokens."""

    async def probe(self, prompt):
        words = sum(len(turn["content"].split()) for turn in prompt)
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
