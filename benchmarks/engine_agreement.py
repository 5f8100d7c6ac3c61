"""Do llama.cpp and MLX say the same? Greedy answers of both engines on one model, and how far their logits differ.

    python -m benchmarks.engine_agreement [--tokens 32]

llama.cpp multiplies quantised weights with activations rounded to 8 bits, MLX computes in float32: where the two best
tokens are closer than that rounding, each may choose another. So the answers are compared up to the first place where
the gap between the two best is within the numerical difference: what 90 % of the places differ by at most. For that
both engines compute the logits of every place of MLX's answer in one pass over the whole text; the difference of two
logits is taken after their common shift, the largest over the ten best tokens of both.

Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from backend_service.engines.base import Engine, Slice
from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_model import LlamaModel
from backend_service.engines.mlx_blas import prepare_blas
from backend_service.kv_pool import PoolLimits
from backend_service.models import locate_mlx_model, locate_model
from backend_service.settings import cache_directory
from service_kit.requests import ChatPrompt, ChatTurn, Prompt, Sampling, TextPrompt

BEST = 10
QUANTILE = 0.9
LIMITS = PoolLimits(1024, max_live=1)
PROMPTS: tuple[Prompt, ...] = (
    *(
        ChatPrompt((ChatTurn("user", question),))
        for question in (
            "What is the capital of France?",
            "Name three fruits.",
            "Explain what a prime number is.",
            "Write a short poem about the sea.",
            "How do I boil an egg?",
            "Translate 'good morning' to Spanish.",
        )
    ),
    TextPrompt("Once upon a time, in a village by the sea,"),
    TextPrompt("def fibonacci(n):\n"),
    TextPrompt("The first ten numbers are 1, 2, 3,"),
    TextPrompt("Monday, Tuesday, Wednesday,"),
    TextPrompt("Water boils at a temperature of"),
    TextPrompt("Dear Sir or Madam,\n"),
)

_Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt on both engines."""

    prompt: Prompt
    llama: tuple[int, ...]
    mlx: tuple[int, ...]
    gaps: tuple[float, ...]
    """Between the two best logits of MLX, at each place of its answer."""
    differences: tuple[float, ...]
    """The largest between the engines' logits there."""
    same_best: tuple[bool, ...]
    """Whether both engines' best token is the same there, on the same text before it."""

    def sure_tokens(self, difference: float) -> int:
        """Leading places of the answer where the gap is larger than that."""
        return next((place for place, gap in enumerate(self.gaps) if gap <= difference), len(self.gaps))

    def agreed_tokens(self) -> int:
        """Leading tokens that both engines said."""
        pairs = zip(self.llama, self.mlx, strict=True)
        return next((place for place, (one, other) in enumerate(pairs) if one != other), len(self.mlx))


def numerical_difference(answers: Sequence[Answer]) -> float:
    """Logits of the two engines differ by no more than that in 90 % of all places."""
    return float(np.quantile([difference for answer in answers for difference in answer.differences], QUANTILE))


def compare(prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Answers of so many tokens from both engines, with one thread each."""
    prepare_blas(1, device="cpu")
    from backend_service.engines.mlx_lm import MlxConfig, MlxEngine
    from backend_service.engines.mlx_model import MlxModel

    llama_model = LlamaModel(locate_model("default"))
    mlx_model = MlxModel(locate_mlx_model("default"), cache=cache_directory() / "mlx", device="cpu")
    llama, mlx = LlamaCppEngine(llama_model, LlamaConfig(LIMITS)), MlxEngine(mlx_model, MlxConfig(LIMITS))
    answers = []
    for prompt in prompts:
        ids = list(mlx.prepare(prompt))
        assert ids == list(llama.prepare(prompt)), "the engines tokenize differently"
        said = {engine.info.name: _answer(engine, ids, tokens) for engine in (llama, mlx)}
        text = [*ids, *said["mlx"][:-1]]
        theirs = _llama_logits(llama_model, text)[len(ids) - 1 :]
        ours = _mlx_logits(mlx_model.module, text)[len(ids) - 1 :]
        answers.append(
            Answer(
                prompt,
                tuple(said["llama_cpp"]),
                tuple(said["mlx"]),
                gaps=tuple(_gap(row) for row in ours),
                differences=tuple(_difference(one, other) for one, other in zip(ours, theirs, strict=True)),
                same_best=tuple((ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist()),
            )
        )
    return answers


def _answer(engine: Engine, ids: list[int], tokens: int) -> list[int]:
    admission = engine.admit(ids, tokens, Sampling(), ignore_eos=True)
    assert admission is not None
    said = list(engine.step([Slice(admission.handle, len(ids) - admission.reused_tokens)]).tokens[admission.handle])
    while len(said) < tokens:
        said += engine.step([Slice(admission.handle, 1)]).tokens[admission.handle]
    engine.release(admission.handle, retain=False)
    return said


def _llama_logits(model: LlamaModel, ids: Sequence[int]) -> _Logits:
    """(tokens, vocabulary), from a context of its own."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(ids)
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model.pointer, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama.cpp could not compute the text (code {code})")
        size = model.vocabulary.size
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(ids), size)).copy()
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)


def _mlx_logits(module: object, ids: Sequence[int]) -> _Logits:
    import mlx.core as mx

    assert callable(module)
    return np.array(module(mx.array([list(ids)]))[0].astype(mx.float32))


def _gap(logits: _Logits) -> float:
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


def _difference(one: _Logits, other: _Logits) -> float:
    best = np.union1d(np.argpartition(one, -BEST)[-BEST:], np.argpartition(other, -BEST)[-BEST:])
    apart = one[best] - other[best]
    return float(np.abs(apart - apart.mean()).max())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    answers = compare(PROMPTS, options.tokens)
    differences = [difference for answer in answers for difference in answer.differences]
    usual = numerical_difference(answers)
    table = Table(title=f"Greedy answers of {options.tokens} tokens")
    for column in ("prompt", "said alike", "sure for", "gap where they part"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for answer in answers:
        agreed = answer.agreed_tokens()
        label = answer.prompt.turns[0].content if isinstance(answer.prompt, ChatPrompt) else str(answer.prompt.text)  # type: ignore[union-attr]
        parted = f"{answer.gaps[agreed]:.3f}" if agreed < len(answer.gaps) else "-"
        table.add_row(label.strip(), str(agreed), str(answer.sure_tokens(usual)), parted)
    Console().print(table)
    places = [(gap, same) for answer in answers for gap, same in zip(answer.gaps, answer.same_best, strict=True)]
    sure = [same for gap, same in places if gap > usual]
    result = {
        "benchmark": "engine_agreement",
        "places": len(places),
        "same_best": round(sum(same for _, same in places) / len(places), 4),
        "difference_median": round(float(np.median(differences)), 3),
        "difference_p90": round(usual, 3),
        "difference_max": round(max(differences), 3),
        "largest_gap_of_another_best": round(max((gap for gap, same in places if not same), default=0.0), 3),
        "places_with_larger_gap": len(sure),
        "same_best_of_those": sum(sure),
        "answers_that_part_early": sum(answer.agreed_tokens() < answer.sure_tokens(usual) for answer in answers),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
