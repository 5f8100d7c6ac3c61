"""How the commands reach a server: address, TLS, token."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from phaseroute.channels import Tls, credentials_of, token_metadata

TOKEN_VARIABLE = "PHASEROUTE_TOKEN"

Target = Annotated[
    str, typer.Option(envvar="PHASEROUTE_TARGET", metavar="HOST:PORT", help="The router, or a single backend.")
]
UseTls = Annotated[
    bool, typer.Option("--tls", envvar="PHASEROUTE_TLS", help="Use TLS and believe whom this system trusts.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="PHASEROUTE_TLS_CA", metavar="PEM", help="Use TLS; the CA that vouches for the server."),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="PHASEROUTE_TLS_CERT", metavar="PEM", help="Certificate for servers that ask for one."),
]
TlsKey = Annotated[Path | None, typer.Option(envvar="PHASEROUTE_TLS_KEY", metavar="PEM", help="Its key.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="PHASEROUTE_TOKEN_FILE", help=f"File that holds the token to send; ${TOKEN_VARIABLE} may hold it, too."
    ),
]


class Security(TypedDict):
    """What `Client` and `AsyncClient` take beside the target."""

    tls: Tls | bool
    token: str | None


PLAIN: Security = {"tls": False, "token": None}


def security(
    tls: bool, tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None
) -> Security:
    """From a command's options and the environment. There is no option for the token itself: other users of a machine
    can read command lines. Raises `typer.BadParameter`."""
    files = Tls(tls_ca, tls_cert, tls_key)
    wanted = files if files != Tls() else tls
    try:
        credentials_of(wanted, None)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(_sentence(error), param_hint="--tls-ca, --tls-cert, --tls-key") from error
    try:
        token = token_file.read_text(encoding="ascii").strip() if token_file else os.environ.get(TOKEN_VARIABLE) or None
        token_metadata(token)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(_sentence(error), param_hint=f"--token-file or {TOKEN_VARIABLE}") from error
    return {"tls": wanted, "token": token}


def _sentence(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "that is no token"  # the error itself holds it
    return f"{error.filename} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
