import pytest

from service_kit import healthcheck
from service_kit.access import is_observer
from service_kit.channels import CHANNEL_OPTIONS, channel_options


@pytest.mark.parametrize("argv", [["--timeout", "0"], ["--timeout", "nan"], ["--timeout", "x"], ["--ad", "a:1"], ["x"]])
def test_wrong_usage_is_code_2_and_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        healthcheck.main(argv)
    assert caught.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("/phaseroute.v1.InferenceService/Status", True),
        ("/phaseroute.v1.InferenceService/WatchStatus", True),
        ("/phaseroute.v1.RouterService/WatchDecisions", True),
        ("/phaseroute.v1.RouterService/ListBackends", True),
        ("/phaseroute.v1.InferenceService/Generate", False),
        ("/phaseroute.v1.InferenceService/CacheProbe", False),
        ("/phaseroute.v1.RouterService/DrainBackend", False),
    ],
)
def test_observers(method: str, expected: bool) -> None:
    assert is_observer(method) is expected


def test_unix_targets_get_a_valid_authority() -> None:
    assert dict(channel_options("unix:/run/a.sock"))["grpc.default_authority"] == "localhost"
    assert channel_options("127.0.0.1:1") == CHANNEL_OPTIONS
