"""What can be said of a prompt's length in tokens without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from service_kit.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt

BYTES_PER_TOKEN = 4
"""About right for English text; used only when no backend counted."""
TOKENS_PER_TURN = 6
"""Role and delimiters of one chat message, about."""
ADDED_TOKENS = 16
"""More than a tokenizer puts around plain text of its own (a start token, a leading space)."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Bounds and a guess; guess and at_least are at most at_most."""

    guess_tokens: int
    at_least_tokens: int
    at_most_tokens: int | None
    """None: no bound without the model's template."""

    @property
    def exact(self) -> bool:
        """The guess is the length."""
        return self.at_least_tokens == self.at_most_tokens


def prompt_size(prompt: Prompt) -> PromptSize:
    """Token ids are counted. A byte-level vocabulary makes at most one token of each byte of text (a tokenizer that
    rewrites text may exceed that for a few rare characters). A chat's template may add anything."""
    match prompt:
        case TokenPrompt(ids):
            return PromptSize(len(ids), len(ids), len(ids))
        case TextPrompt(text):
            size = len(text.encode())
            return PromptSize(-(-size // BYTES_PER_TOKEN), 1, size + ADDED_TOKENS)
        case ChatPrompt(turns):
            size = sum(len(turn.content.encode()) for turn in turns)
            return PromptSize(-(-size // BYTES_PER_TOKEN) + TOKENS_PER_TURN * len(turns), 1, None)
