"""Which addresses do not leave this machine."""

from __future__ import annotations

import ipaddress

_SCHEMES = ("dns:///", "dns:", "ipv4:", "ipv6:")


def stays_here(address: str) -> bool:
    """Whether what goes to a gRPC target, or to who listens there, stays on this machine. When in doubt it does not."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    for scheme in _SCHEMES:
        address = address.removeprefix(scheme)
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
