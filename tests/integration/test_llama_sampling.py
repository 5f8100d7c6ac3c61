"""How the llama.cpp engine draws tokens: by seed and place alone, and as often as their probabilities say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from backend_service.engines.base import Slice
from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from service_kit.requests import Sampling
from tests.integration.engines.tiny_models import tiny_qwen2

PROMPT = tuple(range(40, 60))
DRAWS = 2000


class Watched(LlamaCppEngine):
    """Keeps the logits of the last step."""

    seen: np.ndarray

    def _logits(self) -> np.ndarray:
        logits = super()._logits()
        self.seen = logits.copy()
        return logits


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    model = LlamaModel(tiny_qwen2(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    return Watched(model, LlamaConfig(PoolLimits(256, max_live=1)))


def draw(engine: Watched, sampling: Sampling, *, generated: int = 0, count: int = 1) -> Sequence[int]:
    """What follows the prompt, as if so many of its last tokens had been drawn."""
    admission = engine.admit(PROMPT, count, sampling, ignore_eos=False, generated=generated)
    assert admission is not None
    tokens: list[int] = []
    missing = len(PROMPT) - admission.reused_tokens
    while len(tokens) < count:
        tokens += engine.step([Slice(admission.handle, missing)]).tokens[admission.handle]
        missing = 1
    engine.release(admission.handle, retain=True)
    return tokens


@pytest.mark.parametrize("over", ["seeds", "places", "both"])
def test_tokens_come_as_often_as_their_probabilities_say(engine: Watched, over: str):
    """For seeds one after the other, and for the places of one seed, with a generator each."""
    seen: Counter[int] = Counter()
    for index in range(DRAWS):
        seed, generated = {"seeds": (index, 0), "places": (3, index), "both": (index, index)}[over]
        seen.update(draw(engine, Sampling(temperature=1.0, seed=seed), generated=generated))
    logits = engine.seen[-1].astype(np.float64)
    weights = np.exp(logits - logits.max())
    expected = weights / weights.sum() * DRAWS
    often = expected > 10
    assert often.sum() > 5, "nothing to compare"
    statistic = sum((seen[token] - expected[token]) ** 2 / expected[token] for token in np.flatnonzero(often))
    assert statistic < 2 * often.sum() + 20, "not the distribution asked for"


def test_a_draw_depends_on_seed_and_place(engine: Watched):
    hot = Sampling(temperature=4.0, seed=5)
    first = draw(engine, hot, generated=2)
    assert draw(engine, hot, generated=2) == first
    assert len({token for place in range(20) for token in draw(engine, hot, generated=place)}) > 10
    assert len({token for _ in range(20) for token in draw(engine, Sampling(temperature=4.0))}) > 10, "unseeded"


@pytest.mark.parametrize("seed", [0, 2**32 - 2, 2**32 - 1])
def test_the_ends_of_the_range_of_seeds(engine: Watched, seed: int):
    """llama.cpp takes the last one to mean any."""
    sampling = Sampling(temperature=4.0, seed=seed)
    assert draw(engine, sampling, count=8) == draw(engine, sampling, count=8)
