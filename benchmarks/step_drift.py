"""How the step model follows a change of speed: real llama.cpp, and a second load that comes and goes on its core.

    python -m benchmarks.step_drift [--core 1] [--phase-s 20] [--active 4]

A scheduler runs in this process, pinned to the core, with as many requests in it as it takes: prompts of 20 to 120
tokens, answers of 60. After a phase alone a busy loop starts on the same core, which makes steps take about twice as
long, and after another phase it ends. At each mark the model published by then prices the steps of the next two
seconds: priced over measured time, less one, for all of them, and for those with and without prefill apart. Prints a
table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from backend_service.engines.base import Engine
from backend_service.loading import load_llama
from backend_service.profile import Calibration, step_target_s
from backend_service.request import Request
from backend_service.scheduler import Scheduler, SchedulerLimits
from backend_service.settings import BackendSettings
from backend_service.step_model import StepFit
from backend_service.step_plan import StepLimits
from backend_service.text import TextStream
from service_kit.requests import Sampling
from service_kit.step_time import StepModel, StepShape

MARKS_S = (0.0, 2.0, 5.0, 10.0, 15.0)
"""After each change of load."""
WINDOW_S = 2.0
ANSWER_TOKENS = 60


@dataclass(frozen=True, slots=True)
class Step:
    """One step, and the model that was published when it began."""

    at_s: float
    shape: StepShape
    seconds: float
    model: StepModel | None

    @property
    def with_prefill(self) -> bool:
        """It computes more than decode rows."""
        return self.shape.tokens > self.shape.rows


class Recording:
    """A fit that keeps what it is told."""

    def __init__(self, fit: StepFit) -> None:
        self._fit = fit
        self._model: StepModel | None = None
        self.newest_s: float | None = None
        self.steps: list[Step] = []

    def observe(self, shape: StepShape, seconds: float, at_s: float | None = None) -> None:
        """See `StepTimes`."""
        self.steps.append(Step(time.monotonic(), shape, seconds, self._model))
        self._fit.observe(shape, seconds, at_s)
        self.newest_s = at_s

    def fit(self) -> StepModel | None:
        """See `StepTimes`."""
        self._model = self._fit.fit()
        return self._model


class Traffic:
    """Keeps a scheduler as full as it goes."""

    def __init__(self, engine: Engine, scheduler: Scheduler, active: int) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._active = active
        self._random = random.Random(0)
        self._count = 0

    def run(self, duration_s: float) -> None:
        """For so long, to the end of a step."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            while len(self._scheduler.snapshot().requests) < self._active:
                self._submit()
            self._scheduler.tick()

    def _submit(self) -> None:
        self._count += 1
        vocabulary = self._engine.info.vocabulary
        self._scheduler.submit(
            Request(
                id=f"request-{self._count}",
                tokens=[self._random.randrange(1000, 40_000) for _ in range(self._random.randrange(20, 120))],
                max_new_tokens=ANSWER_TOKENS,
                sampling=Sampling(),
                ignore_eos=True,
                text=TextStream(vocabulary.pieces, ()),
                eos=vocabulary.eos,
                reusable_estimate=0,
                submitted_s=time.monotonic(),
            )
        )


def error_at(steps: list[Step], mark_s: float) -> dict[str, float | int | None]:
    """Of the model published at `mark_s` over the steps of the window after it; shares, or None without such steps."""
    window = [step for step in steps if mark_s <= step.at_s < mark_s + WINDOW_S]
    model = next((step.model for step in window if step.model), None)
    kinds = {
        "all": window,
        "decode": [step for step in window if not step.with_prefill],
        "prefill": [step for step in window if step.with_prefill],
    }
    result: dict[str, float | int | None] = {"steps": len(window)}
    result["step_ms"] = round(1000 * statistics.mean(step.seconds for step in window), 1) if window else None
    for kind, some in kinds.items():
        measured_s = sum(step.seconds for step in some)
        priced_s = sum(model.seconds(step.shape) for step in some) if model else 0.0
        result[kind] = round(priced_s / measured_s - 1, 3) if some and model else None
    return result


def measure(options: argparse.Namespace) -> list[dict[str, float | int | str | None]]:
    """A row for each mark."""
    os.sched_setaffinity(0, {options.core})
    settings = BackendSettings.load(["--max-active", str(options.active), "--cpus", str(options.core)])
    engine = load_llama(settings)
    profile = Calibration(engine, max_active=options.active, clock=time.monotonic).run()
    fit = StepFit()
    for shape, seconds in profile.steps:
        fit.seed(shape, seconds, time.monotonic())
    recording = Recording(fit)
    step = StepLimits(engine.info.max_step_tokens, step_target_s(profile.rates.decode_tokens_per_s))
    scheduler = Scheduler(engine, SchedulerLimits(options.active, step), fit=recording)
    traffic = Traffic(engine, scheduler, options.active)
    changes = [("alone", time.monotonic() + options.phase_s - WINDOW_S - 1)]
    traffic.run(options.phase_s)
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # inherits the core
    try:
        changes.append(("second load", time.monotonic()))
        traffic.run(options.phase_s)
    finally:
        loop.kill()
        loop.wait()
    changes.append(("alone again", time.monotonic()))
    traffic.run(options.phase_s)
    rows: list[dict[str, float | int | str | None]] = []
    for load, since_s in changes:
        for mark_s in MARKS_S if since_s != changes[0][1] else MARKS_S[:1]:
            rows.append({"load": load, "after_s": mark_s, **error_at(recording.steps, since_s + mark_s)})
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--phase-s", type=float, default=20.0, help="length of each of the three phases; 18 or more")
    parser.add_argument("--active", type=int, default=4, help="requests at once")
    options = parser.parse_args()
    if options.phase_s < MARKS_S[-1] + WINDOW_S + 1:
        parser.error(f"--phase-s {options.phase_s:g} ends before the last mark; give 18 or more")
    if not hasattr(os, "sched_setaffinity") or options.core not in os.sched_getaffinity(0):
        parser.error(f"--core {options.core} is not there to be used; name one that is")
    rows = measure(options)
    table = Table(title="Error of the step model while the speed changes: priced over measured time, less one")
    for label in ("load", "after s", "steps", "step ms", "all", "decode", "prefill"):
        table.add_column(label, justify="left" if label == "load" else "right")
    for row in rows:
        errors = ["-" if row[kind] is None else f"{row[kind]:+.1%}" for kind in ("all", "decode", "prefill")]
        table.add_row(f"{row['load']}", f"{row['after_s']:g}", f"{row['steps']}", f"{row['step_ms']}", *errors)
    Console().print(table)
    print(json.dumps({"benchmark": "step_drift", "active": options.active, "rows": rows}))


if __name__ == "__main__":
    main()
