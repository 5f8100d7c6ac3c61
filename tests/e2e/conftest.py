from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import SIMULATED_PAIR, Running, running


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`phaseroute up` with two simulated backends, shared by a module's tests."""
    directory: Path = tmp_path_factory.mktemp("stack")
    config = directory / "phaseroute.toml"
    config.write_text(SIMULATED_PAIR)
    with running("up", "--config", str(config), "--run-dir", str(directory / "run")) as up:
        up.read_until("Ready")
        yield up
