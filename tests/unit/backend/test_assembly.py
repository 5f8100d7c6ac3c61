"""What a backend builds from its settings, with the simulated engine."""

from __future__ import annotations

import time

import pytest

from backend_service.assembly import assemble
from backend_service.settings import BackendSettings

ARTICLE = {"engine": "simulated", "simulated_prefill_rate": 8000.0, "simulated_decode_ms": "1:3.41,3:36,4:43"}


def snapshot(**settings):
    return assemble(BackendSettings(**settings)).scheduler.snapshot()


def test_a_simulated_backend_knows_its_step_times_from_the_start():
    taken = snapshot(**ARTICLE, max_active=4)
    assert taken.step_model is not None
    assert [rows for rows, _ in taken.step_model.row_corrections_s] == [1, 2, 3, 4]
    assert 0 <= time.monotonic() - taken.measured_s < 60
    assert (taken.max_active, taken.max_active_reason) == (4, "")


def test_the_batch_is_chosen_by_them_where_it_is_left_to_the_backend():
    taken = snapshot(**ARTICLE, max_active="auto", max_active_limit=8)
    assert taken.max_active == 1
    assert taken.max_active_reason.startswith("auto: 1 of at most 8; 29")


def test_the_target_between_two_tokens_is_heeded():
    settings = {**ARTICLE, "simulated_decode_ms": "1:20,16:50", "max_active": "auto"}
    assert snapshot(**settings).max_active > 12
    assert snapshot(**settings, inter_token_target_ms=30).max_active == pytest.approx(5, abs=1)


def test_the_rules_of_a_step_are_those_of_the_settings():
    limits = snapshot(**ARTICLE, step_tokens=96, step_target_ms=70).step_limits
    assert (limits.step_tokens, limits.step_target_s) == (96, 0.07)
    assert snapshot(**ARTICLE, step_target_ms=0).step_limits.step_target_s is None
