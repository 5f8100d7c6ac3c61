"""What the MLX engine costs on this machine's CPU, beside MLX itself.

    python -m benchmarks.mlx_engine [--parts blas batch overhead convert] [--rounds 3] [--core 1] [--client-core 0]

- blas: prefill and decode with the BLAS in MLX's wheel and with OpenBLAS, each in a process of its own.
- batch: a decode step of the engine at 1, 2, 4 and 8 rows.
- overhead: four requests at once, through a whole backend (gRPC, scheduler, engine) and through mlx-lm's own
  BatchGenerator in a bare loop; both pinned to the same core, one after the other, in turn, in one run.
- convert: the packaged GGUF model into an mlx-lm folder.

Prints a table for each part and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.mlx.overhead import compare_with_bare_loop
from benchmarks.mlx.probes import probe

PARTS = ("blas", "batch", "overhead", "convert")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table of figures, the first column a label."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table)


def blas(options: argparse.Namespace) -> dict[str, object]:
    """Medians over the rounds, and how many times OpenBLAS is faster."""
    rounds: dict[str, list[dict[str, float]]] = {"reference": [], "openblas": []}
    for _ in range(options.rounds):
        for library, results in rounds.items():
            results.append(probe("speed", core=options.core, library=library))
    medians = {
        library: {name: round(statistics.median(each[name] for each in results), 2) for name in results[0]}
        for library, results in rounds.items()
    }
    ratio = medians["openblas"]["prefill_tokens_per_s"] / medians["reference"]["prefill_tokens_per_s"]
    show(
        f"BLAS, one core: prefill {ratio:.1f} times as fast with OpenBLAS",
        ("BLAS", "prefill tok/s", "decode tok/s alone"),
        [(library, *figures.values()) for library, figures in medians.items()],
    )
    return {**medians, "prefill_ratio": round(ratio, 1)}


def batch(options: argparse.Namespace) -> dict[str, object]:
    """Decode steps by batch size."""
    steps = probe("batch", core=options.core, library="openblas")
    rows = [(size, round(ms, 1), round(1000 * int(size) / ms, 1)) for size, ms in steps.items()]
    show("Decode, one core", ("rows", "step ms", "tok/s"), rows)
    gain = (4 / steps["4"]) / (1 / steps["1"])
    return {"step_ms": {size: round(ms, 1) for size, ms in steps.items()}, "gain_at_4": round(gain, 2)}


def overhead(options: argparse.Namespace) -> dict[str, object]:
    """A whole backend beside a bare loop."""
    results = asyncio.run(
        compare_with_bare_loop(core=options.core, client_core=options.client_core, rounds=options.rounds)
    )
    show(
        "Four requests at once, seconds until the last token",
        ("round", "bare BatchGenerator", "backend over gRPC", "ratio"),
        [
            (number, f"{bare:.2f}", f"{ours:.2f}", f"{ours / bare:.3f}")
            for number, (bare, ours) in enumerate(results, start=1)
        ],
    )
    ratio = statistics.median(ours / bare for bare, ours in results)
    return {"seconds": [[round(bare, 3), round(ours, 3)] for bare, ours in results], "ratio": round(ratio, 3)}


def convert(options: argparse.Namespace) -> dict[str, object]:
    """From file to folder, by content hash, in an empty cache."""
    figures = probe("convert", core=options.core, library="openblas")
    show("The packaged GGUF to an mlx-lm folder", ("", "seconds"), [(name, value) for name, value in figures.items()])
    return dict(figures)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--client-core", type=int, default=0)
    options = parser.parse_args()
    parts = {"blas": blas, "batch": batch, "overhead": overhead, "convert": convert}
    results = {name: parts[name](options) for name in options.parts}
    print(json.dumps({"benchmark": "mlx_engine", **results}))


if __name__ == "__main__":
    main()
