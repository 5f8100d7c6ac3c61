"""A whole MLX backend beside mlx-lm's BatchGenerator in a bare loop: the same prompts, the same core, in turn."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process

from benchmarks.launch import backend
from benchmarks.mlx.probes import ids
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc

REQUESTS = 4
PROMPT_TOKENS = 64
NEW_TOKENS = 48
FLAGS = (
    *("--engine", "mlx", "--device", "cpu", "--max-active", str(REQUESTS)),
    # As the bare loop does: each prompt in one piece. What chunks cost is the price of short stalls, not of the wire.
    *("--step-target-ms", "0", "--step-tokens", "512"),
)


async def compare_with_bare_loop(*, core: int, client_core: int, rounds: int) -> list[tuple[float, float]]:
    """Seconds of (bare loop, backend) by round; who goes first changes from round to round. A round more goes before
    them and does not count."""
    os.sched_setaffinity(0, {client_core})
    pinned = ("taskset", "-c", str(core))
    bare = await asyncio.create_subprocess_exec(
        *pinned, sys.executable, "-m", "benchmarks.mlx.probes", "bare", "--core", str(core), stdin=PIPE, stdout=PIPE
    )
    try:
        assert bare.stdout is not None
        while await bare.stdout.readline() != b"ready\n":  # log lines come before it
            pass
        async with backend(FLAGS, pinned) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            results = []
            for number in range(rounds + 1):
                prompts = [ids(1000 * number + index, PROMPT_TOKENS) for index in range(REQUESTS)]
                ours_first = number % 2 == 1
                ours_s = await _ours(stub, prompts) if ours_first else 0.0
                bare_s = await _bare(bare, prompts)
                ours_s = ours_s or await _ours(stub, prompts)
                results.append((bare_s, ours_s))
            return results[1:]
    finally:
        bare.kill()
        await bare.wait()


async def _bare(process: Process, prompts: list[list[int]]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"prompts": prompts, "tokens": NEW_TOKENS}).encode() + b"\n")
    await process.stdin.drain()
    return float(await process.stdout.readline())


async def _ours(stub: pb_grpc.InferenceServiceStub, prompts: list[list[int]]) -> float:
    async def one(tokens: list[int]) -> None:
        request = pb.GenerateRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=tokens)), max_new_tokens=NEW_TOKENS, ignore_eos=True
        )
        async for _ in stub.Generate(request):
            pass

    begun_s = time.perf_counter()
    await asyncio.gather(*map(one, prompts))
    return time.perf_counter() - begun_s
