"""TLS: which files, whether they go together, and credentials that follow them when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from service_kit.faults import StartupFailed
from service_kit.watched import Watched, read_file


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What a server shows, and whether its clients must show something."""

    cert: Path
    """PEM: its own certificate, then those up to the CA."""
    key: Path
    """PEM, not encrypted."""
    client_ca: Path | None = None
    """PEM: who vouches for clients, which must then show a certificate."""

    def credentials(self) -> grpc.ServerCredentials:
        """Each handshake uses the files as they are then; connections that stand go on. Raises `StartupFailed`."""
        paths = [path for path in (self.cert, self.key, self.client_ca) if path]
        watched = Watched(paths, self._load)
        first = watched.get()
        given = first

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads before each handshake; None: as before, which saves parsing it all again."""
            nonlocal given
            newest = watched.get()
            if newest is given:
                return None
            given = newest
            return newest

        return grpc.dynamic_ssl_server_credentials(
            first,
            changed,  # type: ignore[arg-type]  # the stub does not know of None
            require_client_authentication=self.client_ca is not None,
        )

    def _load(self) -> grpc.ServerCertificateConfiguration:
        chain, key = _pair(self.cert, self.key)
        ca = _ca(self.client_ca) if self.client_ca else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Whom a client believes, and what it shows."""

    ca: Path | None = None
    """PEM: who vouches for the server; None: whom this system trusts."""
    cert: Path | None = None
    """PEM, for servers that ask for one. With `key`, or neither."""
    key: Path | None = None

    def watch(self) -> Watched[grpc.ChannelCredentials]:
        """Credentials for channels to be opened; a channel keeps the ones that it has. Raises `StartupFailed`."""
        return Watched([path for path in (self.ca, self.cert, self.key) if path], self.load)

    def load(self) -> grpc.ChannelCredentials:
        """From the files as they are. Raises `StartupFailed`."""
        if (self.cert is None) != (self.key is None):
            raise StartupFailed("A client certificate and its key go together; give both, or neither.")
        chain, key = _pair(self.cert, self.key) if self.cert and self.key else (None, None)
        return grpc.ssl_channel_credentials(_ca(self.ca) if self.ca else None, key, chain)


def _pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Chain and key, if they go together. Raises `StartupFailed`."""
    chain, secret = read_file(cert, "certificate"), read_file(key, "key")
    try:
        # gRPC would find out at the first handshake, and tell the client alone.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or "unreadable"
        raise StartupFailed(
            f"The certificate {cert} and the key {key} cannot be used together ({_words(why)}); give a PEM certificate "
            "and its own PEM key, without a password."
        ) from error
    return chain, secret


def _ca(path: Path) -> bytes:
    content = read_file(path, "CA certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise StartupFailed(f"{path} holds no CA certificate; give one or more in PEM.") from error
    return content


def _no_password() -> str:
    """Instead of asking for it on the terminal."""
    return ""


def _words(reason: str) -> str:
    return reason.lower().replace("_", " ")
