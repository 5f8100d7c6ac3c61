"""The same bursts over two or more different backends, forced to each of them and routed: who gains what.

    python -m benchmarks.mixed_burst [--workloads warm cold long] [--policies forced:llama two_phase ...]
                                     [--requests 8 48] [--runs 3] [--out DIR] [--client-cpus 0-3]
                                     [--backend NAME="flags of phaseroute-backend" --backend NAME="..."]
                                     [--sweep NAME=1,2,4,8,16,32]

Starts the backends and a router as processes of their own: llama.cpp and MLX on this machine's cores if no --backend is
given. Each run sends every workload (clients/python/phaseroute/workloads.py has them) under every policy, with new
prompts each time; every other run takes the policies in reverse. --sweep sends one backend equal requests at once,
without the router. --out: mixed_burst.json there gets every request of every run, after each burst what there is.

Prints tables and, last, one JSON line; progress goes to stderr. Seconds are the client's, medians over the runs with
the range in brackets. "/ best forced" is the completion time over that of the same run's fastest forced policy.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.mixed import report
from benchmarks.mixed.options import Options, parse
from benchmarks.mixed.run import Outcome, Run
from phaseroute.cli import signals
from phaseroute.errors import PhaserouteError
from phaseroute.local.child import StartFailed
from phaseroute.local.plan import BadPlan

OUT_FILE = "mixed_burst.json"


def main() -> None:
    """Command line."""
    options = parse(__doc__)
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    run_dir = Path(tempfile.mkdtemp(prefix="phaseroute-"))
    benchmark = Run(
        options,
        tell=lambda line: notes.print(Text(line, style="dim")),
        keep=lambda outcome: keep(options, outcome),
    )
    try:
        outcome = signals.run(benchmark.play(run_dir))
        keep(options, outcome)
    except (StartFailed, BadPlan, PhaserouteError) as failure:
        sys.exit(f"{failure}\nLogs: {run_dir}")
    except signals.Interrupted as stopped:
        shutil.rmtree(run_dir)
        sys.exit(stopped.exit_code)
    shutil.rmtree(run_dir)
    console = Console(highlight=False, width=max(Console().width, 140))
    for title, table in report.tables_of(outcome):
        console.print(Text(f"\n{title}", style="bold"))
        console.print(table)
    print(json.dumps(report.summary(options, outcome)))


def keep(options: Options, outcome: Outcome) -> None:
    """Write what there is, if it is to be kept. Raises `BadPlan` where that cannot be."""
    if options.out is None:
        return
    everything = {**report.summary(options, outcome), "bursts": report.every_request(outcome)}
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / OUT_FILE).write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadPlan(f"--out {options.out} cannot be written: {error.strerror}; choose another folder.") from error


if __name__ == "__main__":
    main()
