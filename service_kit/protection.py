"""What a server is protected by, as it was set up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import structlog

from service_kit.access import Access
from service_kit.addresses import stays_here
from service_kit.calls import CallLimits
from service_kit.certificates import ServerTls
from service_kit.channels import ConnectionLimits
from service_kit.tokens import Tokens

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Protection:
    """By default anybody may do everything, as far as there is room."""

    tls: ServerTls | None = None
    token_file: Path | None = None
    admin: bool = True
    """Whether calls that need the scope admin are served."""
    reflection: bool = True
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    calls: CallLimits = field(default_factory=CallLimits)

    def access(self, address: str) -> Access:
        """Who may call a server at this address; says so where that is risky. Raises `StartupFailed`."""
        tokens = Tokens(self.token_file) if self.token_file else None
        if not stays_here(address):
            if tokens is None and not (self.tls and self.tls.client_ca):
                _log.warning(
                    "whoever reaches this address may use it; give --tokens or --tls-client-ca, or listen on 127.0.0.1",
                    address=address,
                )
            elif tokens is not None and self.tls is None:
                _log.warning(
                    "tokens come without TLS: whoever is on the way can read them; give --tls-cert and --tls-key",
                    address=address,
                )
        return Access(tokens, admin=self.admin)
