"""Starting and stopping the services as processes: wrong settings, wrong files, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backend_service.models import locate_model
from phaseroute.v1 import inference_pb2 as pb
from phaseroute.v1 import inference_pb2_grpc as pb_grpc
from service_kit.channels import open_channel
from tests.e2e.processes import SIMULATED, run, serving, started
from tests.integration.backends import request

ANYWHERE = ("--listen", "127.0.0.1:0", "--log-format", "json")


def truncated(tmp_path: Path, size: int) -> Path:
    path = tmp_path / "truncated.gguf"
    with locate_model("default").open("rb") as whole:
        path.write_bytes(whole.read(size))
    return path


async def test_missing_model_file():
    code, said = await run("backend_service", *ANYWHERE, "--model", "/no/such/file.gguf")
    assert code == 1
    loading, error = said.splitlines()
    assert '"loading"' in loading
    assert error.startswith("error: Model file /no/such/file.gguf cannot be read")


async def test_model_file_that_is_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else entirely")
    code, said = await run("backend_service", *ANYWHERE, "--model", str(path))
    assert code == 1
    assert "is not a GGUF file" in said


@pytest.mark.parametrize("size", [4, 1_000_000, 50_000_000])
async def test_truncated_model_file(tmp_path, size):
    flags = (*ANYWHERE, "--model", str(truncated(tmp_path, size)), "--log-level", "error")
    code, said = await run("backend_service", *flags)
    assert code == 1
    assert "cannot be loaded" in said.splitlines()[-1]
    assert "Traceback" not in said


async def test_incomplete_hub_reference():
    code, said = await run("backend_service", *ANYWHERE, "--model", "hf:owner")
    assert code == 1
    assert "hf:owner/repo/file.gguf" in said


async def test_unknown_flag_and_bad_values():
    for flags, says in [
        (("--modle", "x"), "did you mean --model"),
        (("--max-active", "0"), "--max-active is '0'"),
        (("--kv-type", "q3"), "--kv-type is 'q3'"),
        (("--cpus", "zero"), "--cpus is 'zero'"),
        (("--cpus", "4095"), "names cores that are not here"),
        (("--step-tokens", "2", "--max-active", "4"), "raise the one or lower the other"),
        (("--engine", "simulated", "--simulated-decode-ms", "fast"), "1:3.4,4:43"),
    ]:
        code, said = await run("backend_service", *ANYWHERE, *flags)
        assert code == 2, flags
        assert says in said, said


async def test_router_settings_that_cannot_work():
    for flags, says in [
        ((), "--backend is required"),
        (("--backend", "nonsense"), "name=target"),
        (("--backend", "a=h:1", "--backend", "a=h:2"), "more than once"),
        (("--backend", "a=h:1", "--policy", "magic"), "two_phase"),
        (("--backend", "a=h:1", "--policy", "forced:b"), "there are a"),
    ]:
        code, said = await run("router_service", *flags)
        assert code == 2, flags
        assert says in said, said


@pytest.mark.parametrize("module", ["backend_service", "router_service"])
async def test_port_in_use(module):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        own = ("--engine", "simulated") if module == "backend_service" else ("--backend", "a=127.0.0.1:1")
        code, said = await run(module, *own, "--listen", address, "--log-format", "json")
    assert code == 2
    assert "the port is in use; stop the process that has it, or choose another port" in said.splitlines()[-1]


async def test_router_with_a_backend_that_never_answers_starts_and_says_so_quickly():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, speaks no HTTP/2
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        flags = ("--backend", f"mute={target}", "--listen", "127.0.0.1:0", "--log-format", "json")
        async with started("router_service", *flags) as router, open_channel(await serving(router)) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(request("Hello"), timeout=5).read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "mute" in refused.value.details()


async def test_sigterm_lets_the_running_stream_finish():
    async with started("backend_service", *SIMULATED, "--simulated-decode-ms", "1:20") as service:
        async with open_channel(await serving(service)) as channel:
            stub = pb_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request("Hello", max_new_tokens=40, ignore_eos=True))
            seen = [await call.read()]
            service.process.terminate()
            while (response := await call.read()) is not grpc.aio.EOF:
                seen.append(response)
            assert seen[-1].finished.usage.generated_tokens == 40
        assert await service.end(signal.SIGCONT) == 0


async def test_second_ctrl_c_does_not_wait():
    async with started("backend_service", *SIMULATED, "--simulated-decode-ms", "1:20") as service:
        async with open_channel(await serving(service)) as channel:
            call = pb_grpc.InferenceServiceStub(channel).Generate(
                request("Hello", max_new_tokens=4000, ignore_eos=True)
            )
            await call.read()
            service.process.send_signal(signal.SIGINT)
            await service.wait_line('"draining"')
            assert await asyncio.wait_for(service.end(signal.SIGINT), 10) == 0
        assert not any("Traceback" in line for line in service.log)


async def test_settings_from_file_and_environment(tmp_path):
    file = tmp_path / "backend.toml"
    file.write_text('engine = "simulated"\nlisten = "127.0.0.1:0"\nmax_active = 3\nmodel_name = "from file"\n')
    flags = ("--config", str(file), "--max-queued", "7", "--log-format", "json")
    async with (
        started("backend_service", *flags, PHASEROUTE_BACKEND_MODEL_NAME="from env") as service,
        open_channel(await serving(service)) as channel,
    ):
        status = (await pb_grpc.InferenceServiceStub(channel).Status(pb.StatusRequest())).status
    assert (status.max_active, status.max_queued, status.model.name) == (3, 7, "from env")


def hub_cache(root: Path, repo: str, filename: str) -> Path:
    """A local hub cache that holds one file: the packaged model under another name."""
    revision = "0" * 40
    folder = root / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    (snapshot / filename).symlink_to(locate_model("default"))
    return root


async def test_model_from_a_hub_cache(tmp_path):
    cache = hub_cache(tmp_path / "hub", "acme/tiny-GGUF", "tiny.gguf")
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    flags = ("--model", "hf:acme/tiny-GGUF/tiny.gguf", "--listen", "127.0.0.1:0", "--log-format", "json")
    async with started("backend_service", *flags, **environment) as service:
        async with open_channel(await serving(service)) as channel:
            status = (await pb_grpc.InferenceServiceStub(channel).Status(pb.StatusRequest())).status
            assert status.model.name == "tiny"
        assert await service.end() == 0
    async with started(
        "backend_service", *ANYWHERE, "--model", "hf:acme/tiny-GGUF/other.gguf", **environment
    ) as service:
        assert await service.end(signal.SIGCONT) == 1
        assert "could not be fetched" in service.log[-1]
        assert "give --model its path" in service.log[-1]


async def test_while_the_model_loads_the_port_is_open_health_says_so_and_ctrl_c_ends_it(tmp_path):
    endless = tmp_path / "endless.gguf"
    os.mkfifo(endless)  # opening it waits for a writer who never comes
    flags = ("--model", str(endless), "--listen", "127.0.0.1:0", "--log-format", "json")
    async with started("backend_service", *flags) as service:
        address = json.loads(await service.wait_line('"loading"'))["address"]
        async with open_channel(address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            stub = pb_grpc.InferenceServiceStub(channel)
            for call in (
                stub.Generate(request("Hello")).read(),
                stub.Status(pb.StatusRequest()),
                stub.WatchStatus(pb.WatchStatusRequest()).read(),
                stub.CacheProbe(pb.CacheProbeRequest(prompt=pb.Prompt(text="x"))),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "still loading" in refused.value.details()
        assert await asyncio.wait_for(service.end(signal.SIGINT), 10) == 130
        assert not any("Traceback" in line for line in service.log)
