"""Streams whose backend's process is killed or stopped: the short form of benchmarks/recovery.py, whose answers are
compared with undisturbed ones."""

from __future__ import annotations

import signal

import pytest

from benchmarks.recovery import measure

PATIENCE_S = 10.0
"""For a busy machine; the benchmark has the figures."""


@pytest.mark.timeout(120)
async def test_killed_backends_cost_a_stream_a_moment_and_no_token():
    recoveries = await measure(rounds=3, backends=2, number=signal.SIGKILL)

    assert max(each.stall_s for each in recoveries) < PATIENCE_S
    assert max(each.rejoin_s for each in recoveries) < PATIENCE_S


@pytest.mark.timeout(120)
async def test_stopped_backend_is_noticed_by_its_silence():
    (recovery,) = await measure(rounds=1, backends=2, number=signal.SIGSTOP)

    assert recovery.stall_s > 1.0, "nothing but silence tells of it"
    assert recovery.stall_s < 5.0 + PATIENCE_S
