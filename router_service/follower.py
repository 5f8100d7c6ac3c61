"""Keeps one backend's Status coming: WatchStatus, or Status polled where that does not exist."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc

from phaseroute.v1 import inference_pb2 as pb
from router_service.backend import Backend
from service_kit.errors import from_rpc_error

CONNECTED = grpc.ChannelConnectivity.READY
FAILED_TO_CONNECT = grpc.ChannelConnectivity.TRANSIENT_FAILURE
UNREADABLE = "it sent a Status that is no Status message; check that it runs a matching version"


@dataclass(frozen=True, slots=True)
class Following:
    """How to follow a backend."""

    poll_s: float = 0.25
    """Between two polls of Status; each costs a call, so it is more than WatchStatus's 50 ms."""
    silence_s: float = 5.0
    """A backend that says nothing for so long is unreachable: five missed heartbeats."""
    first_retry_s: float = 0.1
    """Waited after a stream broke on a connection that stands; doubles up to last_retry_s while nothing is heard, less
    a random part of it. Where the connection is gone, it is the channel that waits."""
    last_retry_s: float = 2.0


class Follower:
    """Runs until it is cancelled; whatever the backend does is reported, never raised."""

    def __init__(
        self,
        backend: Backend,
        channel: grpc.aio.Channel,
        following: Following,
        *,
        on_status: Callable[[Backend, pb.BackendStatus], None],
        on_loss: Callable[[Backend, str, bool], None],
        rng: random.Random,
    ) -> None:
        """`on_loss` is told why Status stopped, and whether the backend is gone: it was silent, or could not be
        followed again either. A stream alone may break for reasons of its own."""
        self._backend = backend
        self._channel = channel
        self._following = following
        self._on_status = on_status
        self._on_loss = on_loss
        self._rng = rng
        self._retry_s = following.first_retry_s
        self._losses = 0
        """Since something was heard."""

    async def run(self) -> NoReturn:
        """Follow, report the loss, wait, follow again."""
        while True:
            problem, silent = await self._follow()
            self._losses += 1
            self._on_loss(self._backend, problem, silent or self._losses > 1)
            await self._pause()

    async def _pause(self) -> None:
        """Until it is worth another try. A restarted backend listens again while the channel is waiting for its next
        try to connect; a wait of our own after that would keep it out of work for longer."""
        await asyncio.sleep(self._retry_s * self._rng.uniform(0.5, 1.0))
        self._retry_s = min(2 * self._retry_s, self._following.last_retry_s)
        if self._losses < 2:
            return
        while (state := self._channel.get_state(try_to_connect=True)) is not CONNECTED:
            if state is FAILED_TO_CONNECT:
                self._retry_s = self._following.first_retry_s
            await self._channel.wait_for_state_change(state)

    async def _follow(self) -> tuple[str, bool]:
        """Returns why no Status comes any more, and whether that is for silence."""
        try:
            try:
                return await self._watch(), False
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
            return await self._poll(), False
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            return f"{failure.code.name}: {failure}", False
        except TimeoutError:
            return f"no Status for {self._following.silence_s:g} s", True

    async def _watch(self) -> str:
        call = self._backend.stub.WatchStatus(pb.WatchStatusRequest())
        try:
            while True:
                async with asyncio.timeout(self._following.silence_s):
                    update = await call.read()
                if update is grpc.aio.EOF:
                    return "its Status stream ended"
                if update is None:
                    return UNREADABLE
                self._heard(update.status)
        finally:
            call.cancel()

    async def _poll(self) -> str:
        while True:
            call = self._backend.stub.Status(pb.StatusRequest())
            try:
                async with asyncio.timeout(self._following.silence_s):
                    response = await call
            finally:
                call.cancel()
            if response is None:
                return UNREADABLE
            self._heard(response.status)
            await asyncio.sleep(self._following.poll_s)

    def _heard(self, status: pb.BackendStatus) -> None:
        self._retry_s = self._following.first_retry_s
        self._losses = 0
        self._on_status(self._backend, status)
