"""`phaseroute token new`: a token for a client, and the entry that makes servers know it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from service_kit.faults import StartupFailed
from service_kit.identity import Scope
from service_kit.tokens import check_tokens, entry_toml, new_token

token_app = typer.Typer(no_args_is_help=True, help="Make tokens for clients of a router or backend.")


@token_app.callback()
def token() -> None:
    """Make tokens for clients of a router or backend."""


@token_app.command()
def new(
    name: Annotated[str, typer.Argument(help="The client's name, in Status, limits and fairness.")],
    scopes: Annotated[
        str, typer.Option(help=f"What it may do, separated by commas: {', '.join(Scope)}.")
    ] = Scope.GENERATE.value,
    weight: Annotated[float | None, typer.Option(help="Of its share of a busy backend, beside 1 for others.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(min=1, help="Requests that it may have at a time.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and new tokens.")] = None,
    share_cache: Annotated[
        bool, typer.Option("--share-cache", help="Share the KV cache with all who share it; else with nobody.")
    ] = False,
    into: Annotated[Path | None, typer.Option(help="Add the entry to this token file instead of printing it.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the token to this new file, for its owner only, instead of printing it.")
    ] = None,
) -> None:
    """Make a token for NAME. It is shown once and kept nowhere; the token file of the servers holds its hash."""
    options = {
        "weight": weight,
        "max_in_flight": max_in_flight,
        "tokens_per_minute": tokens_per_minute,
        "share_cache": share_cache or None,
    }
    secret = new_token()
    try:
        entry = entry_toml(name, secret, _scopes(scopes), options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if into:
        entries = _with(into, entry)
        if out:
            _write(out, secret + "\n", new=True)
        _write(into, entries)
    elif out:
        _write(out, secret + "\n", new=True)
    if not out:
        print(secret)
    if not into:
        print(f"\n# Into the token file of the servers:\n{entry}", end="")


def _scopes(text: str) -> list[Scope]:
    try:
        return [Scope(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{error}; there are {', '.join(Scope)}", param_hint="--scopes") from error


def _with(path: Path, entry: str) -> str:
    """A token file's text with one more entry. Raises `typer.BadParameter`."""
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        text = f"{before.rstrip()}\n\n{entry}".lstrip()
        check_tokens(path, text)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--into") from error
    except StartupFailed as problem:
        raise typer.BadParameter(
            f"{problem} A name is there once; replace its sha256 by hand, or choose another name.", param_hint="--into"
        ) from problem
    return text


def _write(path: Path, text: str, *, new: bool = False) -> None:
    """All of it or nothing; a new file is readable by its owner only. Raises `typer.BadParameter`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if new and path.exists():
            raise typer.BadParameter(f"{path} is there already; name a new file", param_hint="--out")
        draft.touch(mode=0o600, exist_ok=False)
        if path.exists():
            draft.chmod(path.stat().st_mode & 0o777)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from error
