from collections.abc import Iterator

import pytest

from tests.clients.fake_service import FakeService, serving


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def target(service: FakeService) -> Iterator[str]:
    with serving(service) as address:
        yield address
