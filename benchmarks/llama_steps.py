"""What llama.cpp itself takes for a step on this machine: prefill by chunk size, decode by batch size, KV cache types.

    python -m benchmarks.llama_steps [--cpu 0] [--kv-types f16 q8_0 q4_0] [--rounds 3]

The packaged model, one thread, the engine alone: no scheduler, no wire. Rounds alternate the KV types; each figure is a
median over the rounds. Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

from rich.console import Console
from rich.table import Table

from backend_service.engines.base import Slice
from backend_service.engines.llama_cpp import KV_TYPES, LlamaConfig, LlamaCppEngine
from backend_service.engines.llama_model import LlamaModel
from backend_service.kv_pool import PoolLimits
from backend_service.models import locate_model
from service_kit.requests import Sampling

CHUNKS = (1, 4, 8, 16, 32, 64, 128, 256)
BATCHES = (1, 2, 4, 8)
PREFILL_TOKENS = 256
CONTEXT_TOKENS = 64
DECODE_STEPS = 15


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


def decode_step_s(engine: LlamaCppEngine, batch: int) -> float:
    """Median seconds of a decode step with this many rows."""
    handles = [admit(engine, tokens(100 + row, CONTEXT_TOKENS)) for row in range(batch)]
    for handle in handles:
        engine.step([Slice(handle, CONTEXT_TOKENS)])
    seconds = []
    for _ in range(DECODE_STEPS):
        begun_s = time.perf_counter()
        engine.step([Slice(handle, 1) for handle in handles])
        seconds.append(time.perf_counter() - begun_s)
    for handle in handles:
        engine.release(handle, retain=False)
    return statistics.median(seconds)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=int, default=0)
    parser.add_argument("--kv-types", nargs="+", choices=list(KV_TYPES), default=list(KV_TYPES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.cpu})
    model = LlamaModel(locate_model("default"))
    limits = PoolLimits(4096, max_live=max(BATCHES))
    engines = {kv: LlamaCppEngine(model, LlamaConfig(limits, threads=1, kv_type=kv)) for kv in options.kv_types}
    rates: dict[str, dict[int, list[float]]] = {kv: {chunk: [] for chunk in CHUNKS} for kv in engines}
    steps: dict[str, dict[int, list[float]]] = {kv: {batch: [] for batch in BATCHES} for kv in engines}
    for _ in range(options.rounds):
        for kv, engine in engines.items():
            for chunk in CHUNKS:
                rates[kv][chunk].append(prefill_rate(engine, chunk))
            for batch in BATCHES:
                steps[kv][batch].append(decode_step_s(engine, batch))
    table = Table(title="llama.cpp, one thread: prefill tokens/s by chunk, decode step in ms by batch")
    table.add_column("KV")
    for label in (*(f"chunk {chunk}" for chunk in CHUNKS), *(f"batch {batch}" for batch in BATCHES)):
        table.add_column(label, justify="right")
    summary = {}
    for kv in engines:
        prefill = {chunk: round(statistics.median(values), 1) for chunk, values in rates[kv].items()}
        decode = {batch: round(1000 * statistics.median(values), 1) for batch, values in steps[kv].items()}
        summary[kv] = {"prefill_tokens_per_s": prefill, "decode_step_ms": decode}
        table.add_row(kv, *(f"{rate:.0f}" for rate in prefill.values()), *(f"{ms:.1f}" for ms in decode.values()))
    Console(width=max(Console().width, 140)).print(table)
    print(json.dumps({"benchmark": "llama_steps", "rounds": options.rounds, "kv": summary}))


if __name__ == "__main__":
    main()
