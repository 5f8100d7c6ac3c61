"""Which backends lately got prompts that begin alike, and so may hold the prefix."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from service_kit.requests import ChatPrompt, Prompt, TextPrompt, TokenPrompt

BEGINNINGS_TOKENS = (64, 256, 1024, 4096)
"""Lengths at which beginnings are compared; a prompt has those that it is long enough for."""
BYTES_PER_TOKEN = 4
"""Of UTF-8, where a prompt is text: its beginnings are of 256 to 16,384 bytes."""
MAX_KEYS = 8192
"""Beyond this, the beginning that was not noted for longest is forgotten."""
BACKENDS_PER_KEY = 4
_IDS = "q"
"""How token ids are hashed: as signed numbers of 8 bytes."""


def key_of(prompt: Prompt, salt: str = "") -> tuple[bytes, ...]:
    """Hashes of a prompt's beginnings, the shortest first; empty for a prompt that is shorter than all of them. Prompts
    under different cache salts have none in common, as they share no cache.

    Of a chat, roles and contents count, not what a template makes of them. Prompts of different forms have no hash in
    common.
    """
    longest = BEGINNINGS_TOKENS[-1]
    # A key has room for 64 bytes, a salt may be longer.
    key = blake2b(salt.encode()).digest() if salt else b""
    match prompt:
        case TokenPrompt(ids):
            return _hashes(b"tokens", key, [array(_IDS, ids[:longest]).tobytes()], array(_IDS).itemsize)
        case TextPrompt(text):
            return _hashes(b"text", key, [text[: BYTES_PER_TOKEN * longest].encode()], BYTES_PER_TOKEN)
        case ChatPrompt(turns):
            # The zeros keep (a, bc) and (ab, c) apart.
            parts = (part for turn in turns for part in (turn.role, turn.content))
            pieces = (part[: BYTES_PER_TOKEN * longest].encode() + b"\0" for part in parts)
            return _hashes(b"chat", key, pieces, BYTES_PER_TOKEN)


def _hashes(form: bytes, key: bytes, pieces: Iterable[bytes], token_bytes: int) -> tuple[bytes, ...]:
    return tuple(_running_hashes(form, key, pieces, [token_bytes * tokens for tokens in BEGINNINGS_TOKENS]))


def _running_hashes(form: bytes, key: bytes, pieces: Iterable[bytes], ends: list[int]) -> Iterator[bytes]:
    """One at each of `ends` (bytes, rising) that the pieces reach. Reads no further than the last."""
    running, done = blake2b(digest_size=8, key=key, person=form), 0
    for piece in pieces:
        start = 0
        while ends and done + len(piece) - start >= ends[0]:
            stop = start + ends.pop(0) - done
            running.update(piece[start:stop])
            done += stop - start
            start = stop
            yield running.digest()
        if not ends:
            return
        running.update(piece[start:])
        done += len(piece) - start


class RecentPrefixes:
    """Backends by beginning, the latest first. Bounded; what it forgets is only asked for less often."""

    def __init__(self) -> None:
        self._backends: OrderedDict[bytes, list[str]] = OrderedDict()

    def note(self, keys: Sequence[bytes], backend: str) -> None:
        """A prompt with these keys (`key_of`) was sent there."""
        for key in keys:
            backends = self._backends.setdefault(key, [])
            if backend in backends:
                backends.remove(backend)
            backends.insert(0, backend)
            del backends[BACKENDS_PER_KEY:]
            self._backends.move_to_end(key)
        while len(self._backends) > MAX_KEYS:
            self._backends.popitem(last=False)

    def likely(self, keys: Sequence[bytes], limit: int) -> list[str]:
        """Up to `limit` backends that got such a prompt: those of the longest common beginning first, and among them
        the latest first. Changes nothing."""
        found = dict.fromkeys(name for key in reversed(keys) for name in self._backends.get(key, ()))
        return list(found)[:limit]

    def forget(self, backend: str) -> None:
        """It lost what it held, or is gone."""
        for key in [key for key, backends in self._backends.items() if backend in backends]:
            self._backends[key].remove(backend)
            if not self._backends[key]:
                del self._backends[key]

    def __len__(self) -> int:
        """Beginnings known."""
        return len(self._backends)
