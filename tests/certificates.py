"""Certificates for tests: a CA, and what it vouches for, as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme

from service_kit.certificates import ClientTls, ServerTls


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    """One CA, with its files in one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def pair(self, name: str = "localhost") -> Pair:
        """A certificate for localhost and 127.0.0.1, in files called so; again: a new one in their place."""
        issued = self._ca.issue_cert("localhost", "127.0.0.1", common_name=name)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(pair.key)
        return pair

    def server(self, *, client_ca: bool = False) -> ServerTls:
        pair = self.pair("server")
        return ServerTls(pair.cert, pair.key, self.ca if client_ca else None)

    def client(self, *, cert: bool = False) -> ClientTls:
        if not cert:
            return ClientTls(self.ca)
        pair = self.pair("client")
        return ClientTls(self.ca, pair.cert, pair.key)
