"""What a request may come to take of a KV cache."""

from __future__ import annotations


def worst_case_tokens(prompt_tokens: int, reusable_tokens: int, max_new_tokens: int, *, padded: bool) -> int:
    """Tokens at worst: beyond what it shares, or with padded batches, where each row has a copy, all of it."""
    return prompt_tokens + max_new_tokens - (0 if padded else reusable_tokens)
