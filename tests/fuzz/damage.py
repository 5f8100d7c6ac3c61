"""Bytes that are no message, or not the one that was meant."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

MOST_NESTED = 400
"""Deeper than parsers go: theirs is 100."""
MOST_RANDOM_BYTES = 200


def _truncated(body: bytes, chance: random.Random) -> bytes:
    return body[: chance.randrange(len(body) + 1)]


def _flipped(body: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(body or b"\0")
    for _ in range(chance.randrange(1, 6)):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def _spliced(body: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(body) + 1)
    return body[:at] + chance.randbytes(chance.randrange(1, 12)) + body[at:]


def _doubled(body: bytes, chance: random.Random) -> bytes:
    """Fields that come twice are merged; a half is cut somewhere."""
    return body + body[chance.randrange(len(body) + 1) :]


def _random(body: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.randrange(1, MOST_RANDOM_BYTES))


def _retyped(body: bytes, chance: random.Random) -> bytes:
    """Known field numbers with any wire type."""
    fields = b"".join(_field(chance) for _ in range(chance.randrange(1, 8)))
    return fields + body if chance.random() < 0.5 else body + fields


def _nested(body: bytes, chance: random.Random) -> bytes:
    number = chance.randrange(1, 12)
    for _ in range(chance.randrange(1, MOST_NESTED)):
        body = bytes((number << 3 | 2,)) + _varint(len(body)) + body
    return body


def _grouped(body: bytes, chance: random.Random) -> bytes:
    """Groups, which nobody uses any more: opened, and closed or not."""
    number, depth = chance.randrange(1, 12), chance.randrange(1, MOST_NESTED)
    closed = depth if chance.random() < 0.5 else chance.randrange(depth)
    return bytes((number << 3 | 3,)) * depth + body + bytes((number << 3 | 4,)) * closed


def _promised(body: bytes, chance: random.Random) -> bytes:
    """A length that nothing follows."""
    return (
        bytes((chance.randrange(1, 12) << 3 | 2,)) + _varint(chance.choice((1, 2**20, 2**31 - 1, 2**32, 2**63))) + body
    )


WAYS: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": _truncated,
    "flipped": _flipped,
    "spliced": _spliced,
    "doubled": _doubled,
    "random": _random,
    "retyped": _retyped,
    "nested": _nested,
    "grouped": _grouped,
    "promised": _promised,
}


def _field(chance: random.Random) -> bytes:
    number, kind = chance.randrange(1, 20), chance.choice((0, 1, 2, 5))
    tag = _varint(number << 3 | kind)
    match kind:
        case 0:
            return tag + _varint(chance.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))
        case 1:
            return tag + chance.randbytes(8)
        case 5:
            return tag + chance.randbytes(4)
        case _:
            value = chance.randbytes(chance.randrange(12))
            return tag + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
