"""An MLX backend that cannot load its model: what it says, what its health says, how it ends."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.channels import open_channel
from tests.e2e.processes import run, serving, started
from tests.integration.engines.tiny_models import TINY_MODELS
from tests.integration.mlx_kit import need_mlx

MLX = ("--engine", "mlx", "--device", "cpu", "--listen", "127.0.0.1:0", "--log-format", "json")
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_an_unsupported_architecture_is_never_serving_and_ends_with_code_1(tmp_path: Path):
    need_mlx()
    path = TINY_MODELS["mamba"](tmp_path / "mamba.gguf")
    async with started("backend_service", *MLX, "--model", str(path)) as service:
        address = json.loads(await service.wait_line('"loading"'))["address"]
        seen = []
        async with open_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            with suppress(grpc.aio.AioRpcError):  # the process ends
                async for response in watch:
                    seen.append(response.status)
        assert set(seen) == {NOT_SERVING}
        assert await service.end(signal.SIGCONT) == 1
    assert service.log[-1].startswith("error: ")
    assert "mamba" in service.log[-1]
    assert "llama_cpp" in service.log[-1], "no word of what to do"


async def test_sigterm_ends_it_with_code_0(tmp_path: Path):
    need_mlx()
    path = TINY_MODELS["qwen2"](tmp_path / "qwen2.gguf")
    async with started("backend_service", *MLX, "--model", str(path), XDG_CACHE_HOME=str(tmp_path)) as service:
        await serving(service)
        assert await service.end() == 0
    assert any("draining" in line for line in service.log)


async def test_a_folder_without_config_ends_with_code_1(tmp_path: Path):
    need_mlx()
    code, said = await run("backend_service", *MLX, "--model", str(tmp_path))
    assert code == 1
    assert "config.json" in said.splitlines()[-1]
    assert "Traceback" not in said


async def test_a_folder_is_no_model_for_llama_cpp(tmp_path: Path):
    code, said = await run("backend_service", *MLX[4:], "--model", str(tmp_path))
    assert code == 1
    assert str(tmp_path) in said.splitlines()[-1]
    assert "Traceback" not in said


async def test_without_mlx_the_extra_is_named(tmp_path: Path):
    """Hidden by a module of that name, found first, that fails as a missing one does."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'mlx'\", name='mlx')")
    async with started("backend_service", *MLX, PYTHONPATH=f"{tmp_path}:{':'.join(sys.path)}") as service:
        assert await service.end(signal.SIGCONT) == 1
    assert 'pip install "phaseroute[mlx' in service.log[-1]
    assert not any("Traceback" in line for line in service.log)
