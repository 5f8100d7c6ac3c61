"""How a service that calls others is told to do so."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from service_kit.certificates import ClientTls
from service_kit.peer_channel import PeerSecurity
from service_kit.settings import Settings


class PeerSettings(Settings):
    """Settings of a service with backends: `class RouterSettings(PeerSettings, env_prefix=..., cli_prog_name=...)`."""

    backend_tls: bool = Field(
        False, description="Call backends over TLS, believing whom this system trusts; --backend-tls-ca implies it"
    )
    backend_tls_ca: Path | None = Field(None, description="PEM file of the CA that vouches for backends")
    backend_tls_cert: Path | None = Field(
        None, description="PEM certificate to show to backends that ask for one; needs --backend-tls-key"
    )
    backend_tls_key: Path | None = Field(None, description="PEM key of --backend-tls-cert")
    backend_token_file: Path | None = Field(
        None, description="File that holds the token to send to backends; its scopes: generate, status, route"
    )

    @property
    def peer_security(self) -> PeerSecurity:
        """What `open_channel` takes."""
        if not (self.backend_tls or self.backend_tls_ca or self.backend_tls_cert):
            return PeerSecurity(None, self.backend_token_file)
        tls = ClientTls(self.backend_tls_ca, self.backend_tls_cert, self.backend_tls_key)
        return PeerSecurity(tls, self.backend_token_file)

    @model_validator(mode="after")
    def _backend_pair(self) -> PeerSettings:
        if (self.backend_tls_cert is None) != (self.backend_tls_key is None):
            raise ValueError("--backend-tls-cert and --backend-tls-key go together; give both, or neither")
        return self
