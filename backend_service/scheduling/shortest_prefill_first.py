"""The shortest prompt first, by what is left to compute of it."""

from __future__ import annotations

from backend_service.scheduling.base import Independent, Waiting


class ShortestPrefillFirst(Independent):
    """A prompt may be overtaken by shorter ones for as long as its own prefill takes, and no longer."""

    name = "shortest_prefill_first"
    promote_batch_after_s = 0.0

    def __init__(self, prefill_tokens_per_s: float) -> None:
        """The engine's rate for one request alone. Raises `ValueError` unless it is above 0."""
        if not prefill_tokens_per_s > 0:
            raise ValueError(f"{prefill_tokens_per_s} prefill tokens/s is no rate; measure the engine first")
        self._prefill_tokens_per_s = prefill_tokens_per_s

    def __call__(self, waiting: Waiting) -> float:
        """Due when its prefill would be done if it ran alone from its arrival on."""
        return waiting.prefill_tokens / self._prefill_tokens_per_s
