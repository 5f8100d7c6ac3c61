"""What llama.cpp itself takes on this machine: prefill by chunk size, decode steps by batch size and context, by KV
cache type, with and without flash attention; what idle cells cost; copies to host memory and back.

    python -m benchmarks.llama_steps [--cpu 0] [--variants f16 f16-noflash q8_0 q4_0] [--rounds 3]

The packaged model, one thread, the engine alone: no scheduler, no wire. Rounds alternate the variants; each figure is a
median over the rounds. Prints tables and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

from rich.console import Console
from rich.table import Table

from backend_service.engines.base import Slice
from backend_service.engines.llama_cells import LlamaCells
from backend_service.engines.llama_cpp import LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_model import LlamaModel
from backend_service.host_tier import BLOCK_TOKENS, Block
from backend_service.kv_pool import PoolLimits
from backend_service.models import locate_model
from service_kit.requests import Sampling

VARIANTS: Mapping[str, tuple[str, bool]] = {
    "f16": ("f16", True),
    "f16-noflash": ("f16", False),
    "q8_0": ("q8_0", True),
    "q4_0": ("q4_0", True),
}
"""Name -> KV cache type, flash attention."""
CHUNKS = (1, 4, 8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8)
PREFILL_TOKENS = 256
CONTEXT_TOKENS = 64
CONTEXTS = (512, 1500)
DECODE_STEPS = 15
COPIED_TOKENS = 512
LIMITS = PoolLimits(8192, max_live=max(BATCHES), retained_tokens=8192)


def tokens(start: int, count: int) -> list[int]:
    """Ordinary token ids; different for each start."""
    return [1000 + (start * 131 + position * 7919) % 40_000 for position in range(count)]


def admit(engine: LlamaCppEngine, prompt: list[int]) -> int:
    """The handle of a new sequence that shares nothing."""
    admission = engine.admit(prompt, DECODE_STEPS + 1, Sampling(), ignore_eos=True)
    assert admission is not None
    assert admission.reused_tokens == 0
    return admission.handle


def prefill_rate(engine: LlamaCppEngine, chunk: int) -> float:
    """Tokens/s of one prompt computed in chunks of this size."""
    count = min(PREFILL_TOKENS, 64 * chunk)
    handle = admit(engine, tokens(chunk, count))
    begun_s = time.perf_counter()
    for _ in range(count // chunk):
        engine.step([Slice(handle, chunk)])
    rate = count / (time.perf_counter() - begun_s)
    engine.release(handle, retain=False)
    return rate


def decode_step_ms(engine: LlamaCppEngine, batch: int, context: int = CONTEXT_TOKENS, *, shared: bool = False) -> float:
    """Median milliseconds of a decode step with this many rows, each with so many tokens of context: its own, or
    all but one shared, which stay in the cache."""
    handles = []
    for row in range(batch):
        prompt = [*tokens(99, context - 1), 500 + row] if shared else tokens(100 + row, context)
        admission = engine.admit(prompt, DECODE_STEPS + 1, Sampling(), ignore_eos=True)
        assert admission is not None
        handles.append(admission.handle)
        for done in range(admission.reused_tokens, context, 128):
            engine.step([Slice(admission.handle, min(128, context - done))])
    seconds = []
    for _ in range(DECODE_STEPS):
        begun_s = time.perf_counter()
        engine.step([Slice(handle, 1) for handle in handles])
        seconds.append(time.perf_counter() - begun_s)
    for handle in handles:
        engine.release(handle, retain=shared)
    return 1000 * statistics.median(seconds)


def copy_ms(engine: LlamaCppEngine, *, back: bool) -> float:
    """Milliseconds to copy `COPIED_TOKENS` tokens to host memory, or back, block by block."""
    handle = admit(engine, tokens(8, COPIED_TOKENS))
    for _ in range(COPIED_TOKENS // 128):
        engine.step([Slice(handle, 128)])
    cells: LlamaCells = engine._cells
    blocks = [Block(b"", start, start + BLOCK_TOKENS) for start in range(0, COPIED_TOKENS, BLOCK_TOKENS)]
    begun_s = time.perf_counter()
    copies = [cells.save(handle, block) for block in blocks]
    saved_s = time.perf_counter()
    target = LIMITS.handles - 1  # no sequence has come so far
    for block, copy in zip(blocks, copies, strict=True):
        assert cells.restore(target, copy, block.start, block.end)
    restored_s = time.perf_counter()
    cells.cut(target, 0)
    engine.release(handle, retain=False)
    return 1000 * (restored_s - saved_s if back else saved_s - begun_s)


def measurements(engine: LlamaCppEngine) -> dict[str, Callable[[], float]]:
    """Every figure of one variant by name, to be measured in this order: the longest context stays in the cache for
    those after it. Tokens/s for prefill, else ms."""
    figures: dict[str, Callable[[], float]] = {}
    for chunk in CHUNKS:
        figures[f"prefill chunk {chunk}"] = partial(prefill_rate, engine, chunk)
    for batch in BATCHES:
        figures[f"batch {batch}"] = partial(decode_step_ms, engine, batch)
    for context in CONTEXTS:
        for batch in (1, 4):
            figures[f"batch {batch}, context {context}"] = partial(decode_step_ms, engine, batch, context, shared=True)
    for batch in (1, 4):
        figures[f"batch {batch}, beside {max(CONTEXTS)} idle"] = partial(decode_step_ms, engine, batch)
    figures[f"copy {COPIED_TOKENS} out"] = partial(copy_ms, engine, back=False)
    figures[f"copy {COPIED_TOKENS} back"] = partial(copy_ms, engine, back=True)
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.cpu})
    model = LlamaModel(locate_model("default"))
    engines = {}
    for name in options.variants:
        kv_type, flash = VARIANTS[name]
        engines[name] = LlamaCppEngine(model, LlamaConfig(LIMITS, kv_type=kv_type, flash_attention=flash))
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            for figure, measure in measurements(engine).items():
                seen[name].setdefault(figure, []).append(measure())
            engine.clear_cache()
    summary = {
        name: {figure: round(statistics.median(values), 1) for figure, values in figures.items()}
        for name, figures in seen.items()
    }
    table = Table(title="llama.cpp, one thread: prefill in tokens/s, the rest in ms")
    table.add_column("figure")
    for name in engines:
        table.add_column(name, justify="right")
    for figure in next(iter(summary.values())):
        table.add_row(figure, *(f"{summary[name][figure]:.1f}" for name in engines))
    Console().print(table)
    print(json.dumps({"benchmark": "llama_steps", "rounds": options.rounds, "variants": summary}))


if __name__ == "__main__":
    main()
