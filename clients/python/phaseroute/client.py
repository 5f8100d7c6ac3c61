"""The blocking client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

import grpc

from phaseroute import requests, results
from phaseroute.channels import Tls, channel_options, credentials_of, token_metadata
from phaseroute.errors import PhaserouteError, from_rpc_error
from phaseroute.requests import GenerateOptions, PromptLike
from phaseroute.results import Completion, Delta, Finished, Probe
from phaseroute.v1 import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc

__all__ = ["Client", "PhaserouteError", "Stream"]

T = TypeVar("T")


class Stream(Generic[T]):
    """Events of a running call. Leaving it half read (`close`, the end of a `with` block, garbage collection) cancels
    the call, and the server stops working on it."""

    def __init__(self, call: Any, decode: Callable[[Any], T | None], target: str) -> None:
        self._call = call
        self._decode = decode
        self._target = target

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            for message in self._call:
                value = self._decode(message)
                if value is not None:
                    return value
        except grpc.RpcError as error:
            if self._call.cancelled():
                raise StopIteration from None
            raise from_rpc_error(error, self._target) from error
        raise StopIteration

    def wait_started(self) -> None:
        """Wait until the server has taken the call up: from then on a watch misses nothing. What went wrong before is
        raised by reading on."""
        self._call.initial_metadata()

    def close(self) -> None:
        """Cancel the call unless it is over."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Client:
    """Talks to a router or to a single backend: both offer the same service. Threads may share one client.

    `timeout_s` bounds a whole call, streaming included; None waits for as long as it takes. Every method raises
    `PhaserouteError`.
    """

    def __init__(
        self,
        target: str = "localhost:50051",
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`target` is any gRPC target: `host:port`, `dns:///name:port`, `unix:path`. `tls`: True believes whom this
        system trusts. `token` is sent with each call, over plaintext as well. `credentials` replace `tls`. Raises
        `OSError` and `ValueError` for what cannot be used."""
        self.target = target
        options, secure = channel_options(target), credentials_of(tls, credentials)
        self._metadata = token_metadata(token)
        self._channel = (
            grpc.secure_channel(target, secure, options) if secure else grpc.insecure_channel(target, options)
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._router = router_pb2_grpc.RouterServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Stream[Delta | Finished]:
        """Start generating; the stream brings `Delta`s and one last `Finished`."""
        request = requests.generate_request(prompt, options)
        call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return Stream(call, results.event, self.target)

    def complete(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate and wait for the whole answer."""
        with self.generate(prompt, timeout_s=timeout_s, **options) as stream:
            return results.completion(list(stream))

    def status(self, *, timeout_s: float | None = None) -> inference_pb2.BackendStatus:
        """Queue, KV cache and measured speeds, now."""
        response: inference_pb2.StatusResponse = self._call(
            self._inference.Status, inference_pb2.StatusRequest(), timeout_s
        )
        return response.status

    def probe(self, prompt: PromptLike, *, timeout_s: float | None = None) -> Probe:
        """How much of a prompt is in the KV cache already. Free of side effects."""
        request = inference_pb2.CacheProbeRequest(prompt=requests.prompt_message(prompt))
        return results.probe(self._call(self._inference.CacheProbe, request, timeout_s))

    def route(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[GenerateOptions]
    ) -> router_pb2.Decision:
        """Where a router would send this request, and why. Sends nothing."""
        request = router_pb2.RouteRequest(request=requests.generate_request(prompt, options))
        response: router_pb2.RouteResponse = self._call(self._router.Route, request, timeout_s)
        return response.decision

    def backends(self, *, timeout_s: float | None = None) -> list[router_pb2.BackendEntry]:
        """A router's backends with the last status of each."""
        return list(self._call(self._router.ListBackends, router_pb2.ListBackendsRequest(), timeout_s).backends)

    def watch_decisions(self, *, timeout_s: float | None = None) -> Stream[router_pb2.Decision | router_pb2.Outcome]:
        """Every decision of a router from now on, then its outcome under the same id."""
        request = router_pb2.WatchDecisionsRequest()
        call = self._router.WatchDecisions(request, timeout=timeout_s, metadata=self._metadata)
        return Stream(call, results.decision_event, self.target)

    def drain(
        self, name: str, *, undo: bool = False, grace_s: float | None = None, timeout_s: float | None = None
    ) -> router_pb2.BackendEntry:
        """Send a backend no new work, or take that back. Streams running there go on, after `grace_s` elsewhere."""
        request = router_pb2.DrainBackendRequest(backend=name, undo=undo, grace_s=grace_s)
        response: router_pb2.DrainBackendResponse = self._call(self._router.DrainBackend, request, timeout_s)
        return response.backend

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
