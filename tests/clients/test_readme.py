"""What the Python page shows must work as shown."""

import re
from pathlib import Path

from backend_service.settings import BackendSettings
from phaseroute.local.plan import load_plan
from router_service.settings import RouterSettings
from tests.clients.fake_service import FakeService

PAGE = (Path(__file__).parents[2] / "clients/python/README.md").read_text()


def block(language: str, index: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[index]


def test_the_blocking_example_runs(target: str, service: FakeService, capsys):
    exec(block("python").replace("localhost:50051", target), {})
    assert "one two three 496 small" in capsys.readouterr().out
    assert len(service.requests) == 4


async def test_the_asyncio_example_runs(target: str, service: FakeService):
    example = block("python", 1).replace("localhost:50051", target)
    body = "async def main():\n" + "".join(f"    {line}\n" for line in example.splitlines())
    names: dict = {}
    exec(body, names)
    await names["main"]()
    assert list(service.requests[0].prompt.token_ids.ids) == [40, 50, 60]


def test_the_plan_is_what_the_services_take(tmp_path: Path):
    path = tmp_path / "phaseroute.toml"
    path.write_text(block("toml"))
    plan = load_plan(path)
    for service in plan.backends:
        BackendSettings.load(service.arguments)
    assert RouterSettings.load(plan.router.arguments).targets["laptop"] == "laptop.local:50061"
