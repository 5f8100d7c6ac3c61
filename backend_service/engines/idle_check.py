"""An engine's look at its own books whenever it falls idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 10.0
"""Least time between two checks."""

_log = logging.getLogger(__name__)


class IdleCheck:
    """Books and cache must agree while nothing runs. Where they do not, no cached prefix can be trusted: then
    everything is forgotten, and said so."""

    def __init__(self, check: Callable[[], None], forget: Callable[[], None]) -> None:
        """`check` raises AssertionError where they disagree."""
        self._check = check
        self._forget = forget
        self._checked_s = time.monotonic()

    def run(self) -> None:
        """Nothing is running; called as often as one likes."""
        now_s = time.monotonic()
        if now_s - self._checked_s < INTERVAL_S:
            return
        self._checked_s = now_s
        try:
            self._check()
        except AssertionError as error:
            _log.error("KV cache and its books disagree (%s): the cache is cleared. Please report this.", error)
            self._forget()
