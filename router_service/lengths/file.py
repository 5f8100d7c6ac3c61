"""What a router learnt of output lengths, kept over restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from router_service.lengths.base import LengthEstimator
from service_kit.state_files import StateFile, StateFormat

SAVE_EVERY_S = 30.0
"""What a killed router forgets at most."""
_FORMAT = 1
"""Of the file around what an estimator tells, which has a format of its own."""

_log = structlog.get_logger(__name__)


class LengthFile:
    """Loads when its `async with` block is entered, saves while it runs and when it is left. The estimator is touched
    on the event loop only, the disk in threads only."""

    def __init__(self, lengths: LengthEstimator, directory: Path, *, every_s: float = SAVE_EVERY_S) -> None:
        """One file an estimator, so that to try another costs nothing. `every_s`: between two saves, where estimates
        have changed in the meantime."""
        self._lengths = lengths
        self._file = StateFile(
            directory / f"lengths-{lengths.name}.json",
            StateFormat(f"output lengths ({lengths.name})", _FORMAT, "they are learnt anew from the first answer on"),
        )
        self._every_s = every_s
        self._saved_version = lengths.version
        self._leaving = asyncio.Event()

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._file.path

    async def __aenter__(self) -> Self:
        """Answers that came before are forgotten where there is a file of use."""
        state = await asyncio.to_thread(self._file.read)
        if state is not None:
            if self._lengths.restore(state):
                _log.info("output lengths recalled", file=str(self.path))
            else:
                self._file.reject("it is not what this version writes")
        self._saved_version = self._lengths.version
        self._saving = asyncio.create_task(self._keep(), name="output lengths")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not cancelled: a thread that writes cannot be, and an older save must not come after the last one.
        self._leaving.set()
        await self._saving

    async def _keep(self) -> None:
        """The last save comes after leaving, and whatever the version: some answers change no estimate yet."""
        leaving = False
        while not leaving:
            try:
                leaving = await asyncio.wait_for(self._leaving.wait(), self._every_s)
            except TimeoutError:
                if self._lengths.version == self._saved_version:
                    continue
            await self._save()

    async def _save(self) -> None:
        self._saved_version = self._lengths.version
        if state := self._lengths.state():
            await asyncio.to_thread(self._file.write, state)
