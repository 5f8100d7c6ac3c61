"""How alike the backends of one model are: those that tokenize alike may stand in for one another, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import structlog

from router_service.backend import Backend, State
from router_service.snapshot import Snapshot

log = structlog.get_logger(__name__)


def tokenizer_in_use(backends: Iterable[Backend], model: str) -> str | None:
    """Fingerprint of the tokenizer that most serving backends of a model have, None while none of them serves. A tie
    goes to the one that comes first; one that is not told (empty) counts like any other."""
    votes = Counter(
        backend.snapshot.tokenizer_fingerprint
        for backend in backends
        if backend.snapshot is not None and backend.snapshot.model == model and backend.state is State.SERVING
    )
    # Among equal counts, Counter keeps the order in which it met them.
    return votes.most_common(1)[0][0] if votes else None


def why_left_out(snapshot: Snapshot, in_use: str | None) -> str:
    """Why a backend does not stand in for the others of its model; empty when it does, or none of them serves."""
    if in_use is None or snapshot.tokenizer_fingerprint == in_use:
        return ""
    return (
        f"tokenizes differently: its tokenizer is {snapshot.tokenizer_fingerprint or 'unknown'}, the one in use for "
        f"this model is {in_use or 'unknown'}; only pinned requests go there"
    )


@dataclass(frozen=True, slots=True)
class Likeness:
    """What is known of all backends under one model name, whatever their state; every mapping is by backend name."""

    tokenizers: Mapping[str, str]
    used: tuple[str, ...]
    """Backends with the tokenizer in use."""
    fingerprints: Mapping[str, str]
    """Origins of the weights of those in `used`."""
    precisions: Mapping[str, str]
    """How those in `used` hold their weights."""

    @classmethod
    def of(cls, backends: Iterable[Backend], model: str, in_use: str) -> Self:
        """`in_use` from `tokenizer_in_use`."""
        known = {b.name: b.snapshot for b in backends if b.snapshot is not None and b.snapshot.model == model}
        used = {name: snapshot for name, snapshot in known.items() if snapshot.tokenizer_fingerprint == in_use}
        return cls(
            tokenizers={name: snapshot.tokenizer_fingerprint for name, snapshot in known.items()},
            used=tuple(used),
            fingerprints={name: snapshot.fingerprint for name, snapshot in used.items()},
            precisions={name: snapshot.precision for name, snapshot in used.items()},
        )

    @property
    def one_tokenizer(self) -> bool:
        """All of them stand in for one another."""
        return len(self.used) == len(self.tokenizers)

    @property
    def one_origin(self) -> bool:
        """Weights of those in `used` were taken from the same files."""
        return len(set(self.fingerprints.values())) <= 1

    @property
    def one_precision(self) -> bool:
        """Those in `used` hold their weights in the same way."""
        return len(set(self.precisions.values())) <= 1


class Differences:
    """Logs what differs under one model name, again whenever that changes."""

    def __init__(self) -> None:
        self._told: dict[str, Likeness] = {}
        """By model."""

    def tell(self, backends: Collection[Backend], model: str) -> None:
        """Something was heard of a backend of this model."""
        in_use = tokenizer_in_use(backends, model)
        if in_use is None:
            return
        likeness = Likeness.of(backends, model, in_use)
        if likeness == self._told.get(model):
            return
        self._told[model] = likeness
        if not likeness.one_tokenizer:
            log.warning(
                "one model name, different tokenizers: only the backends in use get work that is not pinned",
                model=model,
                tokenizers=likeness.tokenizers,
                used=likeness.used,
            )
        if not (likeness.one_origin and likeness.one_precision):
            # Precisions differ on purpose, as on unlike devices; other weights give other answers.
            tell = log.info if likeness.one_origin else log.warning
            tell(
                "one model name, different weights or precisions: taken as interchangeable unless a request demands a "
                "precision",
                model=model,
                fingerprints=likeness.fingerprints,
                precisions=likeness.precisions,
            )
