"""How both clients connect: TLS, token, message size, keepalive, reconnecting and retries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import grpc

MAX_RECEIVE_BYTES = 64 * 1024 * 1024

SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "phaseroute.v1.InferenceService"}, {"service": "phaseroute.v1.RouterService"}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.5},
    }
)
"""gRPC retries a call by itself while no message has arrived, so a stream is never started twice. UNAVAILABLE,
and CANCELLED, which calls get that reach a server as it stops (one's own cancel is not repeated); not
RESOURCE_EXHAUSTED: to try again at once would make things worse."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Whom to believe, and what to show. The files are read when a client is made."""

    ca: Path | str | None = None
    """PEM file of the CA that vouches for the server; None: whom this system trusts."""
    cert: Path | str | None = None
    """PEM file, chain included, for servers that ask for a certificate. With `key`, or neither."""
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC. Raises `OSError` for a file that cannot be read, and `ValueError`."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate and its key go together; give both, or neither")
        ca, key, cert = (Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.cert))
        return grpc.ssl_channel_credentials(ca, key, cert)


def credentials_of(tls: Tls | bool, credentials: grpc.ChannelCredentials | None) -> grpc.ChannelCredentials | None:
    """What a channel is to be made with; None: plaintext."""
    if credentials is not None:
        return credentials
    return (tls if isinstance(tls, Tls) else Tls()).credentials() if tls else None


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...] | None:
    """What each call brings. Raises `ValueError` for what cannot be sent; its text does not tell the token."""
    if token is None:
        return None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token is empty, or has characters that no token has; give it as it was handed out")
    return (("authorization", f"Bearer {token}"),)


def channel_options(target: str) -> list[tuple[str, str | int]]:
    """Options for a channel to `target`, any gRPC target: `host:port`, `dns:///name:port`, `unix:path`."""
    options: list[tuple[str, str | int]] = [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        # A long prefill sends nothing for a long time; pings notice a dead peer meanwhile.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own backoff grows to two minutes, and a restarted router would stay unseen that long.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", SERVICE_CONFIG),
    ]
    if target.startswith("unix"):
        # gRPC would send the socket's path as :authority, which some servers and proxies refuse.
        options.append(("grpc.default_authority", "localhost"))
    return options
