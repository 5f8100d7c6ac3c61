import asyncio
from collections.abc import AsyncGenerator

import pytest

from benchmarks.side_by_side.answer import Chunk, Usage
from benchmarks.side_by_side.load import play
from benchmarks.side_by_side.workload import Ask, Workload


class FakeServer:
    """Answers at once; streams in `held` go on until they are cancelled."""

    def __init__(self, *, lost_tokens: int = 0, truncated: int = 0) -> None:
        self.log: list[str] = []
        self.active = self.most_active = 0
        self._lost_tokens = lost_tokens
        self._truncated = truncated
        self.held: set[Ask] = set()

    async def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        self.log.append(f"begin {ask.prompt[0]}")
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            for token in range(ask.new_tokens - self._lost_tokens):
                await asyncio.sleep(0)
                yield Chunk((token,))
            if ask in self.held:
                await asyncio.Event().wait()
            yield Chunk(usage=Usage(len(ask.prompt) - self._truncated, 0, ask.new_tokens))
        finally:
            self.active -= 1
            self.log.append(f"end {ask.prompt[0]}")


def asks(*names: int, new_tokens: int = 3) -> tuple[Ask, ...]:
    return tuple(Ask((name, 0, 0), new_tokens) for name in names)


async def test_what_goes_before_is_answered_before_anything_is_measured() -> None:
    server = FakeServer()
    played = await play(Workload(asks(10, 11), before=asks(1, 2)), server)
    begun = server.log.index("begin 10")
    assert {"end 1", "end 2"} <= set(server.log[:begun])
    assert len(played.measured) == 2


async def test_one_arrival_a_token_in_order_of_the_requests() -> None:
    played = await play(Workload(asks(10, 11, new_tokens=5)), FakeServer())
    for answer in played.measured:
        times = [answer.sent_s, *answer.arrivals_s, answer.ended_s]
        assert len(answer.arrivals_s) == 5
        assert times == sorted(times)
        assert answer.first_token == 0


@pytest.mark.parametrize("in_flight", [1, 2, 3])
async def test_no_more_are_in_flight_than_allowed_and_their_order_is_kept(in_flight: int) -> None:
    server = FakeServer()
    await play(Workload(asks(*range(9)), in_flight=in_flight), server)
    assert server.most_active == in_flight
    begun = [entry for entry in server.log if entry.startswith("begin")]
    assert begun == [f"begin {name}" for name in range(9)]


async def test_streams_beside_decode_when_the_measured_one_is_sent_and_are_cancelled_after_it() -> None:
    server = FakeServer()
    beside = asks(1, 2, 3, new_tokens=20)
    server.held = set(beside)
    played = await play(Workload(asks(10, new_tokens=40), beside=beside), server)
    assert [entry for entry in server.log if entry.startswith("begin")][-1] == "begin 10"
    assert server.active == 0
    assert server.log.index("end 10") < min(server.log.index(f"end {name}") for name in (1, 2, 3))
    assert [len(arrivals) for arrivals in played.beside_arrivals_s] == [20, 20, 20]
    assert all(arrivals[7] <= played.measured[0].sent_s for arrivals in played.beside_arrivals_s)


@pytest.mark.parametrize("server", [FakeServer(lost_tokens=1), FakeServer(truncated=1)], ids=["lost", "truncated"])
async def test_an_answer_to_another_question_is_not_measured(server: FakeServer) -> None:
    wrong = pytest.RaisesExc(RuntimeError, match="would not compare")
    with pytest.RaisesGroup(wrong, flatten_subgroups=True):
        await play(Workload(asks(10)), server)
