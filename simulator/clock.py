"""Time that passes only when somebody sleeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    """Stands in for both `time.monotonic` and `time.sleep`; it can be set, too."""

    now_s: float = 0.0

    def __call__(self) -> float:
        """The time in seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        self.now_s += seconds
