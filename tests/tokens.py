"""Token files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service_kit.identity import Scope
from service_kit.tokens import entry_toml


def token_of(name: str) -> str:
    return f"phr_token-of-{name}"


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call by a client of the file."""
    return (("authorization", f"Bearer {token_of(name)}"),)


def write_tokens(path: Path, clients: dict[str, list[Scope]], **options: Any) -> Path:
    """A token file with these clients' scopes; `options` go for all of them."""
    path.write_text("\n".join(entry_toml(name, token_of(name), scopes, options) for name, scopes in clients.items()))
    return path


def write_token(path: Path, name: str) -> Path:
    """A file with one client's token."""
    path.write_text(f"{token_of(name)}\n")
    return path
