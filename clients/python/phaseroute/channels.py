"""Channel options of both clients: message size, keepalive, reconnecting and retries."""

from __future__ import annotations

import json

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
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.5},
    }
)
"""gRPC retries a call by itself while no message has arrived, so a stream is never started twice. Only UNAVAILABLE:
RESOURCE_EXHAUSTED means that trying again at once would make things worse."""


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
