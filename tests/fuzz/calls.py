"""What can be called, and one call as it goes onto the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import router_pb2

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC of the contract."""

    path: str
    request: type[Any]
    endless: bool = False
    """Its stream goes on until the client leaves."""
    router_only: bool = False


_INFERENCE = "/phaseroute.v1.InferenceService"
_ROUTER = "/phaseroute.v1.RouterService"
METHODS: Sequence[Method] = (
    Method(f"{_INFERENCE}/Generate", pb.GenerateRequest),
    Method(f"{_INFERENCE}/Status", pb.StatusRequest),
    Method(f"{_INFERENCE}/WatchStatus", pb.WatchStatusRequest, endless=True),
    Method(f"{_INFERENCE}/CacheProbe", pb.CacheProbeRequest),
    Method(f"{_ROUTER}/Route", router_pb2.RouteRequest, router_only=True),
    Method(f"{_ROUTER}/ListBackends", router_pb2.ListBackendsRequest, router_only=True),
    Method(f"{_ROUTER}/WatchDecisions", router_pb2.WatchDecisionsRequest, endless=True, router_only=True),
    Method(f"{_ROUTER}/DrainBackend", router_pb2.DrainBackendRequest, router_only=True),
)
BY_PATH = {method.path: method for method in METHODS}
WEIGHTS = (10, 1, 1, 5, 6, 1, 1, 3)
"""How often each is called: what has more to it, more often."""


@dataclass(frozen=True, slots=True)
class Call:
    """Bytes and metadata for one method of a backend or of the router."""

    method: str
    body: bytes
    metadata: Metadata
    at_router: bool
    how: str
    """How it was made: "structured", "merged", or the kind of damage."""

    def to_json(self) -> str:
        """So that it can be made again."""
        metadata = [[key, {"hex": value.hex()} if isinstance(value, bytes) else value] for key, value in self.metadata]
        return json.dumps(
            {
                "method": self.method,
                "body": self.body.hex(),
                "metadata": metadata,
                "at_router": self.at_router,
                "how": self.how,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> Call:
        """As `to_json` wrote it."""
        record = json.loads(line)
        metadata = tuple(
            (key, bytes.fromhex(value["hex"]) if isinstance(value, dict) else value)
            for key, value in record["metadata"]
        )
        return cls(record["method"], bytes.fromhex(record["body"]), metadata, record["at_router"], record["how"])
