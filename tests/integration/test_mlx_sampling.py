"""How the MLX engine draws tokens, against the same in plain numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from backend_service.engines.base import Vocabulary
from service_kit.requests import PENALTY_WINDOW_TOKENS, Sampling

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

from backend_service.engines.mlx_sampling import MlxSampler, draw  # noqa: E402

SIZE = 50
VOCABULARY = Vocabulary(tuple(bytes([token]) for token in range(SIZE)), frozenset({3, 7}))


@pytest.fixture(autouse=True)
def on_the_cpu():
    mx.set_default_device(mx.cpu)
    mx.disable_compile()


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, SIZE).astype(np.float32)


def sampler(prompt=(1, 2), *, ignore_eos=False, **sampling) -> MlxSampler:
    return MlxSampler(Sampling(**sampling), VOCABULARY, ignore_eos=ignore_eos, prompt=prompt)


def drawn(count: int, values: np.ndarray, **sampling) -> Counter[int]:
    """How often each token comes up, a fresh seed each time."""
    return Counter(
        int(sampler(seed=seed, temperature=sampling.get("temperature", 1.0), **without_temperature(sampling))
            .draw(mx.array(values)[None]).item())
        for seed in range(count)
    )  # fmt: skip


def without_temperature(sampling: dict) -> dict:
    return {name: value for name, value in sampling.items() if name != "temperature"}


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def test_greedy_is_the_argmax():
    assert int(sampler().draw(mx.array(logits())[None]).item()) == int(logits().argmax())


def test_a_row_of_plain_requests_is_drawn_at_once_and_any_other_row_by_row():
    values = np.stack([logits(seed) for seed in range(4)])
    plain = draw([sampler() for _ in range(4)], mx.array(values))
    mixed = draw([sampler(), sampler(temperature=1.0, top_k=1), sampler(), sampler(ignore_eos=True)], mx.array(values))
    assert plain.tolist() == values.argmax(axis=1).tolist()
    assert mixed.tolist()[:3] == plain.tolist()[:3]
    assert plain.dtype == mixed.dtype == mx.int32


def test_a_batch_that_ignores_the_end_is_drawn_at_once():
    values = np.stack([logits(seed) for seed in range(3)])
    values[:, 3] = 100.0
    rows = draw([sampler(ignore_eos=True) for _ in range(3)], mx.array(values))
    values[:, [3, 7]] = -np.inf
    assert rows.tolist() == values.argmax(axis=1).tolist()


def test_the_end_is_never_drawn_when_it_is_ignored():
    values = logits()
    values[3] = 100.0
    assert int(sampler().draw(mx.array(values)[None]).item()) == 3
    rest = int(np.argmax(np.where(np.arange(SIZE) == 3, -np.inf, values)))
    assert int(sampler(ignore_eos=True).draw(mx.array(values)[None]).item()) == rest
    assert 3 not in drawn(50, values, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probabilities_say(temperature: float):
    values = logits(4)
    count = 3000
    seen = drawn(count, values, temperature=temperature)
    expected = softmax(values / temperature) * count
    often = expected > 20
    statistic = sum((seen[token] - expected[token]) ** 2 / expected[token] for token in np.flatnonzero(often))
    assert statistic < 3 * often.sum() + 20, "not the distribution asked for"


def test_top_k_keeps_the_k_most_likely():
    values = logits(1)
    assert set(drawn(400, values, top_k=3, temperature=5.0)) == set(np.argsort(-values)[:3].tolist())


def test_top_k_of_the_whole_vocabulary_or_more_keeps_all():
    values = np.zeros(SIZE, np.float32)
    assert len(drawn(600, values, top_k=SIZE + 10)) > 40


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9])
def test_top_p_keeps_the_fewest_that_add_up_to_it(top_p: float):
    values = logits(2)
    order = np.argsort(-values)
    below = np.cumsum(softmax(values)[order]) < top_p
    nucleus = set(order[: below.sum() + 1].tolist())
    seen = set(drawn(1500, values, top_p=top_p, temperature=1.5))
    assert seen <= nucleus
    assert len(seen) >= 0.9 * len(nucleus)


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely():
    values = logits(3)
    probabilities = softmax(values)
    likely = set(np.flatnonzero(probabilities >= 0.1 * probabilities.max()).tolist())
    seen = set(drawn(1500, values, min_p=0.1, temperature=2.0))
    assert seen <= likely
    assert len(seen) >= 0.9 * len(likely)


def test_penalties():
    values = logits(5)
    prompt = [10, 11, 11, 12]
    penalized = MlxSampler(
        Sampling(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25),
        VOCABULARY,
        ignore_eos=False,
        prompt=prompt,
    )
    expected = values.copy()
    for token, times in Counter(prompt).items():
        value = expected[token]
        expected[token] = (value / 1.5 if value > 0 else value * 1.5) - times * 0.5 - 0.25
    got = np.array(penalized._penalize(mx.array(values)[None], mx.array(prompt))[0])
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_what_was_drawn_counts_from_then_on():
    """The same logits again and again: a presence penalty works through them from the top."""
    values = logits(6)
    penalized = sampler(prompt=(0,), presence_penalty=2.0, repetition_penalty=1e6)
    first = [int(penalized.draw(mx.array(values)[None]).item()) for _ in range(3)]
    assert len(set(first)) == 3


def test_only_the_last_tokens_count():
    values = logits(7)
    best = int(values.argmax())
    long_ago = [best, *[(best + 1) % SIZE] * PENALTY_WINDOW_TOKENS]
    lately = [best, *[(best + 1) % SIZE] * (PENALTY_WINDOW_TOKENS - 1)]
    assert int(sampler(prompt=long_ago, presence_penalty=2.0, repetition_penalty=1e6).draw(
        mx.array(values)[None]).item()) == best  # fmt: skip
    assert int(sampler(prompt=lately, presence_penalty=2.0, repetition_penalty=1e6).draw(
        mx.array(values)[None]).item()) != best  # fmt: skip


def test_a_seed_repeats_its_draws_and_no_other_seed_does():
    values = mx.array(np.zeros(SIZE, np.float32))[None]

    def run(seed: int | None) -> list[int]:
        one = sampler(seed=seed, temperature=1.0)
        return [int(one.draw(values).item()) for _ in range(12)]

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(20)}) == 20
    assert len({tuple(run(None)) for _ in range(5)}) == 5


def test_half_precision_logits_are_filtered_in_single():
    values = mx.array(logits(8)).astype(mx.bfloat16)[None]
    token = sampler(temperature=1.0, top_p=0.9, min_p=0.05, seed=1).draw(values)
    assert 0 <= int(token.item()) < SIZE
