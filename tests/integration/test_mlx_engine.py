"""What holds for the MLX engine alone; tests/integration/engines has what holds for every engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_service.engines.base import Slice
from service_kit.faults import EngineFailed
from service_kit.requests import Sampling
from tests.integration.engines.bench import Bench
from tests.integration.engines.prompts import LENGTH, NEW, prompt
from tests.integration.engines.tiny_models import TINY_MODELS

pytest.importorskip("mlx.core", exc_type=ImportError)

from backend_service.engines.mlx_lm import MlxConfig, MlxEngine, group
from backend_service.engines.mlx_model import MlxModel
from backend_service.kv_pool import PoolLimits

CAPACITY = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MlxModel:
    folder = tmp_path_factory.mktemp("qwen2")
    return MlxModel(TINY_MODELS["qwen2"](folder / "qwen2.gguf"), cache=folder / "cache", device="cpu")


class Counting:
    """Stands in for the model and notes the shape of each forward pass."""

    def __init__(self, module) -> None:
        self._module = module
        self.shapes: list[tuple[int, int]] = []
        self.fail = False

    def __call__(self, tokens, cache):
        if self.fail:
            raise RuntimeError("[metal::malloc] no room")
        self.shapes.append(tuple(tokens.shape))
        return self._module(tokens, cache=cache)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


@pytest.fixture
def counted(model: MlxModel, monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting(model.module)
    monkeypatch.setattr(model, "module", counting)
    return counting


def make(model: MlxModel, *, run_ahead: bool = False, **limits: int) -> MlxEngine:
    return MlxEngine(
        model,
        MlxConfig(PoolLimits(CAPACITY, max_live=4, retained_tokens=CAPACITY, **limits), run_ahead=run_ahead),
    )


def admit(engine: MlxEngine, seed: int, length: int, new: int = NEW) -> int:
    admission = engine.admit(prompt(engine, seed, length), new, Sampling(), ignore_eos=True)
    assert admission is not None
    return admission.handle


def test_a_step_is_one_pass_for_the_rows_and_one_for_chunks_of_like_length(model: MlxModel, counted: Counting):
    engine = make(model)
    first, second, third = (admit(engine, seed, LENGTH) for seed in range(3))
    engine.step([Slice(first, LENGTH)])
    assert counted.shapes == [(1, LENGTH - 1), (1, 1)], "the last token of a prompt is computed like a decoded one"
    counted.shapes.clear()
    engine.step([Slice(first, 1), Slice(second, 20), Slice(third, 21)])
    assert sorted(counted.shapes) == [(1, 1), (2, 21)]
    counted.shapes.clear()
    engine.step([Slice(first, 1), Slice(second, LENGTH - 20), Slice(third, LENGTH - 21)])
    assert sorted(counted.shapes) == [(2, LENGTH - 21), (3, 1)]
    counted.shapes.clear()
    engine.step([Slice(handle, 1) for handle in (first, second, third)])
    assert counted.shapes == [(3, 1)]
    engine.check_integrity()


def test_running_ahead_computes_the_next_step_before_it_is_asked_for(model: MlxModel, counted: Counting):
    engine = make(model, run_ahead=True)
    handle = admit(engine, 0, LENGTH, new=3)
    engine.step([Slice(handle, LENGTH)])
    assert counted.shapes == [(1, LENGTH - 1), (1, 1), (1, 1)]
    engine.step([Slice(handle, 1)])
    assert len(counted.shapes) == 4
    engine.step([Slice(handle, 1)])
    assert len(counted.shapes) == 4, "a step was started for a request that ends"


def test_what_was_computed_ahead_is_not_retained(model: MlxModel):
    engine = make(model, run_ahead=True)
    handle = admit(engine, 0, LENGTH)
    said = [*engine.step([Slice(handle, LENGTH)]).tokens[handle], *engine.step([Slice(handle, 1)]).tokens[handle]]
    engine.release(handle, retain=True)
    assert engine.stats().retained_tokens == LENGTH + 1
    assert engine.probe((*prompt(engine, 0, LENGTH), *said, 5)) == LENGTH + 1
    engine.check_integrity()


def test_a_failed_computation_loses_its_requests_and_nothing_else(model: MlxModel, counted: Counting):
    engine = make(model)
    bench = Bench(engine)
    expected = bench.ask(prompt(engine, 0, LENGTH), NEW)
    handle = admit(engine, 1, LENGTH)
    counted.fail = True
    with pytest.raises(EngineFailed, match=r"no room.*send it again"):
        engine.step([Slice(handle, LENGTH)])
    counted.fail = False
    use = engine.stats()
    assert (use.used_tokens, use.reserved_tokens) == (0, 0)
    assert Bench(engine).ask(prompt(engine, 0, LENGTH), NEW).tokens == expected.tokens
    engine.check_integrity()


def test_admission_counts_every_row_as_long_as_the_longest(model: MlxModel):
    engine = make(model)
    admit(engine, 0, 20, new=CAPACITY // 2 - 20)
    admit(engine, 1, 20, new=4)
    assert engine.admit(prompt(engine, 2, 20), 4, Sampling(), ignore_eos=True) is None, "three rows of 512 are over"


def test_a_retained_copy_serves_many_at_once(model: MlxModel):
    """Each has a copy of its own: nobody writes into anybody else's."""
    engine = make(model)
    bench = Bench(engine)
    trunk = prompt(engine, 0, LENGTH)
    bench.ask(trunk, 1)
    names = [bench.submit((*trunk, 100 + index), NEW) for index in range(4)]
    bench.run()
    assert [bench.answer(name).cached_tokens for name in names] == [LENGTH] * 4
    for index, name in enumerate(names):
        assert bench.answer(name).tokens == Bench(make(model)).ask((*trunk, 100 + index), NEW).tokens


def test_a_cut_prefix_gives_its_memory_back(model: MlxModel):
    """Outputs give way first; what stays of the sequence is no view of the whole."""
    engine = make(model)
    handle = admit(engine, 0, LENGTH, new=200)
    engine.step([Slice(handle, LENGTH)])
    for _ in range(150):
        engine.step([Slice(handle, 1)])
    engine.release(handle, retain=True)
    whole = sum(cache.nbytes for cache in engine._retained[handle])
    filler = admit(engine, 1, LENGTH, new=CAPACITY - 2 * LENGTH)
    assert engine.stats().retained_tokens == LENGTH
    assert sum(cache.nbytes for cache in engine._retained[handle]) < whole / 2
    engine.release(filler, retain=False)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({}, []),
        ({1: 5}, [[1]]),
        ({1: 34, 2: 33, 3: 33}, [[1, 2, 3]]),
        ({1: 100, 2: 3, 3: 2}, [[1], [2, 3]]),
        ({1: 100, 2: 95, 3: 94, 4: 93}, [[1, 2], [3, 4]]),
    ],
)
def test_chunks_are_grouped_while_padding_stays_cheap(lengths: dict[int, int], expected: list[list[int]]):
    chunks = {handle: [0] * length for handle, length in lengths.items()}
    assert group(chunks, padding_tokens=8) == expected


def test_books_that_disagree_are_noticed(model: MlxModel):
    engine = make(model)
    handle = admit(engine, 0, LENGTH)
    engine.step([Slice(handle, LENGTH)])
    engine._batches.gather([handle]).caches[0].trim(1)
    with pytest.raises(AssertionError, match="two lengths"):
        engine.check_integrity()


def test_the_model_file_is_converted_once(model: MlxModel, tmp_path: Path):
    path = TINY_MODELS["qwen2"](tmp_path / "other-name.gguf")
    cache = tmp_path / "cache"
    one = MlxModel(path, cache=cache, device="cpu")
    made = sorted((file, file.stat().st_mtime_ns) for file in cache.rglob("*") if file.is_file())
    two = MlxModel(path, cache=cache, device="cpu")
    assert made == sorted((file, file.stat().st_mtime_ns) for file in cache.rglob("*") if file.is_file())
    assert one.fingerprint == two.fingerprint == model.fingerprint
