"""An engine that finds its books wrong forgets what it has cached, and no more often than it should looks."""

from __future__ import annotations

import logging

import pytest

from backend_service.engines import idle_check
from backend_service.engines.idle_check import INTERVAL_S, IdleCheck


class Books:
    def __init__(self) -> None:
        self.checks = self.forgotten = 0
        self.wrong = False

    def check(self) -> None:
        self.checks += 1
        assert not self.wrong, "two lengths"

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(idle_check.time, "monotonic", lambda: now[0])
    return now


def test_it_looks_once_an_interval(clock: list[float]):
    books = Books()
    check = IdleCheck(books.check, books.forget)
    for _ in range(3):
        check.run()
    assert books.checks == 0
    clock[0] += INTERVAL_S
    for _ in range(3):
        check.run()
    assert (books.checks, books.forgotten) == (1, 0)


def test_wrong_books_are_reported_and_forgotten(clock: list[float], caplog: pytest.LogCaptureFixture):
    books = Books()
    books.wrong = True
    check = IdleCheck(books.check, books.forget)
    clock[0] += INTERVAL_S
    with caplog.at_level(logging.ERROR):
        check.run()
    assert books.forgotten == 1
    assert "two lengths" in caplog.text
