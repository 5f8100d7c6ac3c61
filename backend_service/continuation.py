"""An answer that another backend began: what is known of it, and whether it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backend_service.engines.base import Vocabulary
from backend_service.request import FinishReason
from backend_service.text import TextStream
from service_kit.faults import InvalidRequest


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is left to generate; only the end of the stream was lost."""

    reason: FinishReason
    text: str
    """Not shown before."""


def check_generated(generated: Sequence[int], vocabulary: Vocabulary) -> None:
    """Raises `InvalidRequest` for an id that this model has no token for."""
    for index, token in enumerate(generated):
        if token >= vocabulary.size:
            raise InvalidRequest(
                f"attempt.generated_token_ids[{index}]",
                f"is {token}, but the vocabulary ends at {vocabulary.size - 1}; continue an answer on the model that "
                "began it",
            )


def resume(
    text: TextStream, generated: Sequence[int], *, eos: frozenset[int], ignore_eos: bool, max_new_tokens: int
) -> Complete | None:
    """Bring the text to where these tokens left it, and say whether they end the answer.

    What they show was sent with them. What they hold back comes with the next token; with the last one of
    `max_new_tokens` it was sent too (see `Request.accept`). An end token is no part of the text: what is held back
    before it may not have been sent.
    """
    for token in generated:
        text.feed(token)
    if text.stopped:
        return Complete(FinishReason.STOP, "")
    if len(generated) == max_new_tokens:
        text.flush()
        return Complete(FinishReason.STOP if text.stopped else FinishReason.LENGTH, "")
    if generated and generated[-1] in eos and not ignore_eos:
        held = text.flush()
        return Complete(FinishReason.STOP if text.stopped else FinishReason.EOS, held)
    return None
