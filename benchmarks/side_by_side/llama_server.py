"""The peer: llama.cpp's own server, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from benchmarks.side_by_side.answer import Chunk, Usage
from benchmarks.side_by_side.faults import SetUpFailed
from benchmarks.side_by_side.load import Running
from benchmarks.side_by_side.process import started
from benchmarks.side_by_side.workload import SLOTS, Ask

_HOST = Path(__file__).with_name("llama_server_host.py")
_DEADLINE_S = 600.0
_DATA = "data: "


class LlamaServer:
    """A llama-server that serves."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def stream(self, ask: Ask) -> AsyncGenerator[Chunk, None]:
        """See `Server.stream`. Raises httpx.HTTPError, and RuntimeError for an error within the stream."""
        body = {
            "prompt": ask.prompt,
            "n_predict": ask.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
        }
        async with self._client.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith(_DATA):
                    yield chunk_of(json.loads(line.removeprefix(_DATA)))


@asynccontextmanager
async def llama_server(python: Path, model: Path, *, kv_tokens: int, slots: int, core: int) -> AsyncIterator[Running]:
    """A server with one thread, the whole process on one core, and its settings as they resolved. `python` is that of
    the peer's environment; `slots` -1 leaves their number to the server. Raises `SetUpFailed`."""
    command = [str(python), str(_HOST), str(model), str(kv_tokens), str(slots)]
    async with started(command, core, lambda line: line.startswith('{"address"')) as process:
        said = json.loads(process.ready_line)
        async with httpx.AsyncClient(
            base_url=said["address"], timeout=_DEADLINE_S, limits=httpx.Limits(max_connections=None)
        ) as client:
            (await client.get("/health")).raise_for_status()
            props = (await client.get("/props")).json()
            slot_tokens = props["default_generation_settings"]["n_ctx"]
            if props["total_slots"] != SLOTS:
                raise SetUpFailed(
                    f"The peer made {props['total_slots']} slots where {SLOTS} are compared; use --peer-slots."
                )
            settings = {
                **said["settings"],
                "n_slots": SLOTS,
                "n_ctx_slot": slot_tokens,
                "kv_unified": slot_tokens == kv_tokens,
            }
            yield Running(LlamaServer(client), process, settings)


def chunk_of(event: dict[str, object]) -> Chunk:
    """From one JSON object of the stream; the last one has the timings. Raises RuntimeError for anything else."""
    match event:
        case {"error": error}:
            raise RuntimeError(f"llama-server: {error}")
        case {"timings": {"cache_n": int(cached), "prompt_n": int(computed), "predicted_n": int(generated)}}:
            return Chunk(usage=Usage(cached + computed, cached, generated))
        case {"tokens": list(ids)}:
            return Chunk(tuple(ids))
        case _:
            raise RuntimeError(f"llama-server sent something unknown: {event}")
