"""What a GGUF file says of itself: metadata and tensor directory, without the weights.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from service_kit.faults import StartupFailed

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_LONGEST_DIMENSIONS = 4
_TYPES = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24), 8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
}  # fmt: skip
"""ggml's tensor types by number: name, values in a block, bytes of a block."""
_FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s", 12: "q3_k_m",
    13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k", 19: "iq2_xxs", 20: "iq2_xs",
    21: "q2_k_s", 22: "iq3_xs", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl", 26: "iq3_s", 27: "iq3_m", 28: "iq2_s",
    29: "iq2_m", 30: "iq4_xs", 31: "iq1_m", 32: "bf16", 36: "tq1_0", 37: "tq2_0", 38: "mxfp4",
}  # fmt: skip
"""`general.file_type`: how llama.cpp's quantisation programs call what they made."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """Rows out first, as in a checkpoint; the file has it the other way round."""
    type: str
    """Lower-case, such as "q4_1"; "type 99" for one unknown here."""
    offset: int
    """Of its first byte in the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensor directory."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def precision(self) -> str:
        """How most weights are stored, as people say it, such as "q4_1" or "q4_k_m"."""
        named = precision_named(str(self.metadata.get("general.file_type")))
        if named:
            return named
        values: Counter[str] = Counter()
        for tensor in self.tensors:
            values[tensor.type] += prod(tensor.shape)
        return values.most_common(1)[0][0] if values else "unknown"


def precision_named(file_type: str) -> str:
    """What number `general.file_type` stands for, such as "q4_k_m"; "" for one unknown here."""
    return _FILE_TYPES.get(int(file_type), "") if file_type.isdecimal() else ""


def read_gguf(path: Path) -> GgufFile:
    """Raises `StartupFailed` when the file cannot be read, is none, or lacks bytes that its directory promises."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise StartupFailed(
            f"Model file {path} is no readable GGUF ({error}); it may be truncated: fetch it again, or choose another."
        ) from error


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data)
    magic, version, tensor_count, field_count = cursor.take("4sIQQ")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(f"begins with {magic!r}, version {version}")
    metadata = {cursor.string(): cursor.value(cursor.one("I")) for _ in range(field_count)}
    directory = []
    end = 0
    for _ in range(tensor_count):
        name, rank = cursor.string(), cursor.one("I")
        if rank > _LONGEST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {rank} dimensions")
        shape = cursor.take(f"{rank}Q")
        number, offset = cursor.take("IQ")
        kind, block_values, block_bytes = _TYPES.get(number, (f"type {number}", 1, 0))
        end = max(end, offset + prod(shape) // block_values * block_bytes)
        directory.append((name, tuple(reversed(shape)), kind, offset))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    start = -(-cursor.at // alignment) * alignment
    if start + end > len(data):
        raise ValueError(f"ends at byte {len(data)}, its tensors at {start + end}")
    tensors = tuple(GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in directory)
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """Reads on from a place in the file. Little-endian, unaligned."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def one(self, layout: str) -> Any:
        return self.take(layout)[0]

    def string(self) -> str:
        size = self.one("Q")
        self.at += size
        if self.at > len(self._data):
            raise ValueError("a string ends after the file")
        return self._data[self.at - size : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"unknown metadata type {kind}")
            return self.one(_SCALARS[kind])
        item, count = self.take("IQ")
        if item in _SCALARS:
            return list(self.take(f"{count}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]
