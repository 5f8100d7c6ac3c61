"""What a router knows after a restart: processes of their own, as people start them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc, router_pb2, router_pb2_grpc
from service_kit.channels import open_channel
from tests.e2e.processes import SIMULATED, serving, started, until_serving

QUICK = (*SIMULATED, "--simulated-prefill-rate", "5000", "--simulated-decode-ms", "1:1")
BUDGET_TOKENS = 2000
ANSWERS = 12


def ask(**fields) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(text="How long will this become?"), max_new_tokens=BUDGET_TOKENS, workload="chat", **fields
    )


@asynccontextmanager
async def router(backend: str, directory: Path, end: signal.Signals = signal.SIGTERM):
    """The process and clients of it."""
    flags = ("--backend", f"one={backend}", "--listen", "127.0.0.1:0", "--log-format", "json")
    async with started("router_service", *flags, "--keep-lengths", "--state-dir", str(directory)) as process:
        target = await serving(process)
        async with open_channel(target) as channel:
            admin = router_pb2_grpc.RouterServiceStub(channel)
            await until_serving(admin, 1)
            yield process, inference_pb2_grpc.InferenceServiceStub(channel), admin
        await process.end(end)


async def expected_tokens(admin) -> int:
    """How long the next answer is taken to become."""
    decision = (await admin.Route(router_pb2.RouteRequest(request=ask()))).decision
    return decision.candidates[0].forecast.expected_new_tokens


async def teach(inference) -> None:
    """Answers much shorter than their budget: a stop string ends them at once."""
    for _ in range(ANSWERS):
        responses = [response async for response in inference.Generate(ask(stop=[" "]))]
        assert responses[-1].finished.finish_reason == pb.FINISH_REASON_STOP


def warnings(process) -> list[dict[str, str]]:
    entries = [json.loads(line) for line in process.log if line.startswith("{")]
    return [entry for entry in entries if entry.get("level") == "warning" and "state file" in entry["event"]]


async def test_a_restarted_router_predicts_what_it_did_before_and_a_damaged_file_stops_nothing(tmp_path):
    async with started("backend_service", *QUICK) as process:
        backend = await serving(process)
        async with router(backend, tmp_path) as (_, inference, admin):
            assert await expected_tokens(admin) == BUDGET_TOKENS
            await teach(inference)
            learnt = await expected_tokens(admin)
        assert learnt < BUDGET_TOKENS / 10
        (file,) = tmp_path.iterdir()

        async with router(backend, tmp_path, signal.SIGKILL) as (restarted, _, admin):
            assert await expected_tokens(admin) == learnt
        assert warnings(restarted) == []

        os.truncate(file, file.stat().st_size // 2)
        async with router(backend, tmp_path) as (restarted, inference, admin):
            assert await expected_tokens(admin) == BUDGET_TOKENS
            await teach(inference)
        assert [entry["file"] for entry in warnings(restarted)] == [str(file)]

        async with router(backend, tmp_path) as (restarted, _, admin):
            assert await expected_tokens(admin) == learnt
        assert warnings(restarted) == []
