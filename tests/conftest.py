"""For all tests: nothing is read from or written to this user's own cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import service_kit  # noqa: F401 - before anything imports gRPC
from backend_service.engines.mlx_blas import prepare_blas

prepare_blas(1, device="cpu")  # before any test imports MLX: it is ten times as slow without


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured rates are shared by the tests of one run, processes that they start included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PHASEROUTE_ROUTER_KEEP_LENGTHS", "false")  # no test learns from another
        yield
