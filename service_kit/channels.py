"""gRPC options of both ends, and how to open a channel."""

from __future__ import annotations

import grpc

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""gRPC's own limit of 4 MiB is less than a long prompt as token ids; without one, a message could eat all memory.
Equal on both ends and both hops, so that a router never accepts what it cannot forward."""
KEEPALIVE_TIME_MS = 30_000
"""A dead peer is noticed within 40 s even while a long prefill sends nothing."""
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 10_000
"""What a server tolerates from clients. gRPC's own 5 minutes end in GOAWAY "too_many_pings" during a long prefill;
other languages' clients ping every 10 to 30 s."""
MIN_BACKOFF_MS = 200
MAX_BACKOFF_MS = 2_000
"""gRPC's own 2 minutes would keep a restarted backend waiting."""

Options = tuple[tuple[str, int | str], ...]

_BOTH_ENDS: Options = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise pings stop after two without data in between, just when they are needed.
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # On by default: a second process on the same port would silently take half of the connections.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.initial_reconnect_backoff_ms", MIN_BACKOFF_MS),
    ("grpc.min_reconnect_backoff_ms", MIN_BACKOFF_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_BACKOFF_MS),
    # Channels to one target share connection and backoff otherwise: a new channel would not be a new start.
    ("grpc.use_local_subchannel_pool", 1),
)


def channel_options(target: str) -> Options:
    """Options for a channel to a gRPC target: `host:port`, `dns:///...`, `unix:...`."""
    if target.startswith(("unix:", "unix-abstract:")):
        # gRPC would send the percent-encoded path as :authority, which servers in other languages refuse.
        return (*CHANNEL_OPTIONS, ("grpc.default_authority", "localhost"))
    return CHANNEL_OPTIONS


def open_channel(target: str) -> grpc.aio.Channel:
    """A plaintext channel on the running event loop. Connects on the first call; close it when done."""
    return grpc.aio.insecure_channel(target, options=channel_options(target))
