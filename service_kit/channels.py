"""gRPC options of both ends, and how to open a channel."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from service_kit.peer_channel import PeerChannel, PeerSecurity

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""What a client sends and takes. Its servers decide what is too much for them."""
KEEPALIVE_TIME_MS = 30_000
"""A dead peer is noticed within 40 s even while a long prefill sends nothing."""
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 10_000
"""What a server tolerates from clients. gRPC's own 5 minutes end in GOAWAY "too_many_pings" during a long prefill;
other languages' clients ping every 10 to 30 s."""
MIN_BACKOFF_MS = 200
MAX_BACKOFF_MS = 1_000
"""gRPC's own 2 minutes would keep a restarted backend waiting."""

Options = tuple[tuple[str, int | str], ...]

_BOTH_ENDS: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise pings stop after two without data in between, just when they are needed.
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a server takes from clients that it does not know yet; a router's must hold for its backends too, so that it
    never accepts what it cannot forward."""

    message_bytes: int = 16 * 1024 * 1024
    """gRPC's own 4 MiB is less than a long prompt as token ids; without a limit, a message could eat all memory."""
    metadata_bytes: int = 16 * 1024
    connections: int = 4096
    streams: int = 8192
    """At a time on one connection; more wait in the client. A router has one connection to a backend, for everybody."""
    idle_s: float = 600.0
    """A connection without calls is closed after it; clients open another one when they need it."""
    handshake_s: float = 20.0
    """A connection that has not said what it is by then is closed."""


def server_options(limits: ConnectionLimits) -> Options:
    """gRPC options of a server."""
    return (
        *_BOTH_ENDS,
        ("grpc.max_receive_message_length", limits.message_bytes),
        # Where the soft limit is lower, what lies between is refused at random.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_connection_idle_ms", round(1000 * limits.idle_s)),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.handshake_s)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # On by default: a second process on the same port would silently take half of the connections.
        ("grpc.so_reuseport", 0),
    )


SERVER_OPTIONS = server_options(ConnectionLimits())

CHANNEL_OPTIONS: Options = (
    *_BOTH_ENDS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
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


def open_channel(target: str, security: PeerSecurity | None = None) -> grpc.aio.Channel:
    """A channel on the running event loop, plaintext unless `security` says otherwise. Connects on the first call;
    close it when done. Raises `StartupFailed` for files that cannot be used."""
    if security:
        return PeerChannel(target, channel_options(target), security)
    return grpc.aio.insecure_channel(target, options=channel_options(target))
