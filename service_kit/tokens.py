"""The token file: who may call, and what each may do."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from service_kit.faults import StartupFailed, Unauthenticated
from service_kit.identity import Caller, Scope
from service_kit.watched import Watched, read_file

HEADER = "authorization"
TOKEN_BYTES = 32
"""Too many to guess, so a plain hash of it is as good as a slow one."""
SALT_DIGITS = 32

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class KnownToken:
    """One token, by its hash, and whose it is."""

    digest: bytes
    caller: Caller


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: _Digest | list[_Digest]
    scopes: list[str]
    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False)
    max_in_flight: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    cache_salt: str = Field("", max_length=64)
    share_cache: bool = False


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    salt_secret: str = ""
    clients: dict[str, _Entry]


class Tokens:
    """Tells callers apart by the file, as it is at each call. A damaged file leaves things as they were."""

    def __init__(self, path: Path) -> None:
        """Raises `StartupFailed`."""
        self._known = Watched([path], partial(load_tokens, path))

    def caller(self, metadata: _Metadata) -> Caller:
        """Whose token a call brings. Raises `Unauthenticated`."""
        token = bearer_of(metadata)
        digest = hashlib.sha256(token.encode()).digest()
        found = None
        # Every entry, also after a hit: how long it takes says nothing.
        for known in self._known.get():
            if hmac.compare_digest(known.digest, digest):
                found = known.caller
        if found is None:
            raise Unauthenticated("The token is not known here; ask whoever runs this server for a new one.")
        return found


def bearer_of(metadata: _Metadata) -> str:
    """The token in `authorization: Bearer TOKEN`. Raises `Unauthenticated`."""
    given = [value for key, value in metadata if key == HEADER]
    if not given:
        raise Unauthenticated('This server asks for a token; send it as metadata "authorization: Bearer TOKEN".')
    scheme, _, token = str(given[0]).partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated('The metadata "authorization" must be there once, as "Bearer TOKEN".')
    return token.strip()


def load_tokens(path: Path) -> tuple[KnownToken, ...]:
    """All entries of a token file. Raises `StartupFailed`; its message names the place, never what stands there."""
    return check_tokens(path, read_file(path, "token file").decode("utf-8", "replace"))


def check_tokens(path: Path, text: str) -> tuple[KnownToken, ...]:
    """All entries of what is, or is to be, in that file. Raises as `load_tokens`."""
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise StartupFailed(f"The token file {path} is no valid TOML: {error}.") from error
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        # Not pydantic's own text: it repeats the input, which may be a token where its hash should be.
        problem = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("list[", "constrained-")))
        advice = "a SHA-256 in 64 hex digits, never the token itself" if "sha256" in place else problem["msg"]
        raise StartupFailed(f"The token file {path}: {place or 'top'}: {advice}.") from error
    known = [_known(path, name, entry, file.salt_secret) for name, entry in file.clients.items()]
    tokens = tuple(each for entry in known for each in entry)
    if len({token.digest for token in tokens}) < len(tokens):
        raise StartupFailed(f"The token file {path} has one sha256 twice; give each client a token of its own.")
    return tokens


def cache_salt(name: str, secret: str) -> str:
    """A client's own salt: equal wherever name and secret are."""
    return hmac.new(secret.encode(), name.encode(), "sha256").hexdigest()[:SALT_DIGITS]


def new_token() -> str:
    """A token that nobody has."""
    return f"phr_{secrets.token_urlsafe(TOKEN_BYTES)}"


def read_token(path: Path) -> str:
    """A token from a file that holds nothing else. Raises `StartupFailed`."""
    token = read_file(path, "token file").decode("ascii", "replace").strip()
    if not token or not token.isprintable() or not token.isascii() or " " in token:
        raise StartupFailed(f"{path} holds no token; it must hold one, in one line, and nothing else.")
    return token


def entry_toml(name: str, token: str, scopes: Iterable[Scope], options: Mapping[str, Any]) -> str:
    """What goes into a token file for a token. `options`: further keys of the entry, without those that are None.
    Raises ValueError for a name or options that could not be read back."""
    if not _NAME.fullmatch(name):
        raise ValueError(f'"{name}" is no name; use up to 64 letters, digits, ".", "_" or "-"')
    digest = hashlib.sha256(token.encode()).hexdigest()
    entry = {"sha256": digest, "scopes": [each.value for each in scopes]}
    entry |= {key: value for key, value in options.items() if value is not None}
    _Entry.model_validate(entry)
    # What JSON writes of strings, lists, numbers and booleans is TOML as well.
    return "\n".join([f'[clients."{name}"]', *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]) + "\n"


def _known(path: Path, name: str, entry: _Entry, secret: str) -> list[KnownToken]:
    where = f"The token file {path}: clients.{name}"
    if not _NAME.fullmatch(name):
        raise StartupFailed(f'{where}: a name has up to 64 letters, digits, ".", "_" or "-".')
    unknown = sorted(set(entry.scopes) - set(Scope))
    if unknown:
        raise StartupFailed(f'{where}: there is no scope "{unknown[0]}"; there are {", ".join(Scope)}.')
    if entry.share_cache and entry.cache_salt:
        raise StartupFailed(f"{where}: share_cache and cache_salt exclude each other; remove one.")
    salt = "" if entry.share_cache else entry.cache_salt or cache_salt(name, secret)
    caller = Caller(
        name=name,
        scopes=frozenset(Scope(each) for each in entry.scopes),
        cache_salt=salt,
        weight=entry.weight,
        max_in_flight=entry.max_in_flight,
        tokens_per_minute=entry.tokens_per_minute,
    )
    digests = [entry.sha256] if isinstance(entry.sha256, str) else entry.sha256
    return [KnownToken(bytes.fromhex(digest), caller) for digest in digests]
