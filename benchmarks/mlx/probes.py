"""Measurements of MLX that need a process of their own: a process has one BLAS, and MLX one thread.

    python -m benchmarks.mlx.probes speed|batch|convert|bare [--core 1] [--library openblas|reference]
        [--device cpu|gpu] [--weights auto|stored|float32|bfloat16] [--run-ahead] [--rows 1 2 4 8]

`batch` is worth a run on a GPU too: it shows what weights and running ahead do there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend_service.engines.mlx_blas import prepare_blas
from backend_service.models import locate_mlx_model
from backend_service.settings import cache_directory

if TYPE_CHECKING:
    from backend_service.engines.mlx_model import MlxModel

PREFILL_TOKENS = 64
DECODE_STEPS = 6
BATCHES = [1, 2, 4, 8]
KV_TOKENS = 4096
BATCH_STEPS = 30


def probe(kind: str, *, core: int, library: str) -> dict[str, Any]:
    """Run one of them in a process of its own, pinned to a core; what it found."""
    command = [sys.executable, "-m", "benchmarks.mlx.probes", kind, "--core", str(core), "--library", library]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ids(seed: int, count: int) -> list[int]:
    """Ordinary tokens, others for each seed."""
    return [1000 + (seed * 131 + position * 7919) % 40_000 for position in range(count)]


def load(options: argparse.Namespace) -> MlxModel:
    """The packaged model, after the BLAS."""
    prepare_blas(1, device=options.device, library="" if options.library == "openblas" else options.library)
    from backend_service.engines.mlx_model import MlxModel

    return MlxModel(
        locate_mlx_model("default"),
        cache=cache_directory() / "mlx",
        device=options.device,
        weights=options.weights,
        kv_tokens=KV_TOKENS,
    )


def speed(options: argparse.Namespace) -> dict[str, float]:
    """Prefill of a short prompt, decode alone; tokens/s."""
    model = load(options)
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    def prefill(tokens: list[int]) -> tuple[float, list[Any]]:
        cache = make_prompt_cache(model.module)
        begun_s = time.perf_counter()
        model.module(mx.array([tokens]), cache=cache)
        mx.eval([each.state for each in cache])
        return time.perf_counter() - begun_s, cache

    prefill(ids(0, 4))  # the first allocates
    prefill_s, cache = prefill(ids(1, PREFILL_TOKENS))
    steps_s = []
    for step in range(DECODE_STEPS):
        begun_s = time.perf_counter()
        mx.eval(model.module(mx.array([ids(2 + step, 1)]), cache=cache)[:, -1].argmax())
        steps_s.append(time.perf_counter() - begun_s)
    return {"prefill_tokens_per_s": PREFILL_TOKENS / prefill_s, "decode_tokens_per_s": 1 / statistics.median(steps_s)}


def batch(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the engine's decode step by batch size; contexts of some 100 tokens."""
    from backend_service.engines.base import Slice
    from backend_service.kv_pool import PoolLimits
    from service_kit.requests import Sampling

    model = load(options)
    from backend_service.engines.mlx_lm import MlxConfig, MlxEngine

    limits = PoolLimits(KV_TOKENS * max(1, max(options.rows) // 8), max_live=max(options.rows))
    engine = MlxEngine(model, MlxConfig(limits, run_ahead=options.run_ahead))
    steps = BATCH_STEPS if model.device == "gpu" else DECODE_STEPS
    result = {}
    for size in options.rows:
        handles = []
        for row in range(size):
            tokens = ids(100 * size + row, 100)
            admission = engine.admit(tokens, 60, Sampling(), ignore_eos=True)
            assert admission is not None
            engine.step([Slice(admission.handle, len(tokens) - admission.reused_tokens)])
            handles.append(admission.handle)
        steps_s = []
        for _ in range(steps + 2):
            begun_s = time.perf_counter()
            engine.step([Slice(handle, 1) for handle in handles])
            steps_s.append(time.perf_counter() - begun_s)
        result[str(size)] = 1000 * statistics.median(steps_s[2:])
        for handle in handles:
            engine.release(handle, retain=False)
    return result


def convert(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of a conversion, and of finding it again."""
    prepare_blas(1, device=options.device, library="" if options.library == "openblas" else options.library)
    begun_s = time.perf_counter()
    from backend_service.engines import mlx_gguf

    imported_s = time.perf_counter() - begun_s
    path = locate_mlx_model("default")
    result = {"import_s": round(imported_s, 2)}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("convert_s", "find_again_s"):
            begun_s = time.perf_counter()
            mlx_gguf.convert(path, Path(folder), progress=lambda _text: None)
            result[name] = round(time.perf_counter() - begun_s, 2)
    return result


def bare(options: argparse.Namespace) -> None:
    """mlx-lm's own BatchGenerator in a loop. Reads {"prompts": [[id]], "tokens": n} a line, answers the seconds until
    the last token of all."""
    model = load(options)
    from mlx_lm.generate import BatchGenerator

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts, tokens = order["prompts"], order["tokens"]
        generator = BatchGenerator(model.module, prefill_batch_size=len(prompts), prefill_step_size=512)
        begun_s = time.perf_counter()
        running = set(generator.insert(prompts, [tokens] * len(prompts)))
        while running:
            running -= {response.uid for response in generator.next()[1] if response.finish_reason}
        print(time.perf_counter() - begun_s, flush=True)
        generator.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("speed", "batch", "convert", "bare"))
    parser.add_argument("--core", type=int)
    parser.add_argument("--library", default="openblas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--run-ahead", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    if options.kind == "bare":
        bare(options)
    else:
        print(json.dumps({"speed": speed, "batch": batch, "convert": convert}[options.kind](options)))


if __name__ == "__main__":
    main()
