import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
import structlog

from service_kit.logs import configure_logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_json_lines_hold_the_fields() -> None:
    stream = io.StringIO()
    configure_logs("auto", "info", stream)
    structlog.get_logger("router").info("routed", backend="gpu", scores=[1.5, 2.0])
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "routed", "level": "info", "logger": "router", "backend": "gpu", "scores": [1.5, 2.0]}


def test_standard_loggers_go_through_the_same_renderer() -> None:
    stream = io.StringIO()
    configure_logs("json", "info", stream)
    logging.getLogger("grpc.aio").warning("lost %s", "connection", extra={"peer": "a"})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["logger"], line["level"], line["peer"]) == (
        "lost connection",
        "grpc.aio",
        "warning",
        "a",
    )


def test_warnings_are_logged() -> None:
    stream = io.StringIO()
    configure_logs("json", "info", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
    assert "old call" in json.loads(stream.getvalue())["event"]


@pytest.mark.parametrize(
    ("log_format", "stream", "as_json", "colored"),
    [
        ("auto", io.StringIO, True, False),
        ("auto", Terminal, False, True),
        ("json", Terminal, True, False),
        ("text", io.StringIO, False, False),
    ],
)
def test_formats(log_format: str, stream: type[io.StringIO], as_json: bool, colored: bool) -> None:
    output = stream()
    configure_logs(log_format, "info", output)
    structlog.get_logger("x").info("started", port=5)
    line = output.getvalue()
    assert line.startswith("{") == as_json
    assert ("\x1b[" in line) == colored
    assert "started" in line


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_traceback_shows_no_local_variables(log_format: str) -> None:
    stream = io.StringIO()
    configure_logs(log_format, "info", stream)
    secret = "the user's prompt"
    try:
        len(5)  # type: ignore[arg-type]
    except TypeError:
        structlog.get_logger("x").exception("call failed")
    assert secret not in stream.getvalue()
    assert "TypeError" in stream.getvalue()
    if log_format == "json":
        assert "Traceback" in json.loads(stream.getvalue())["exception"]


def test_the_level_holds_for_both_kinds_of_logger() -> None:
    stream = io.StringIO()
    configure_logs("json", "warning", stream)
    structlog.get_logger("x").info("no")
    logging.getLogger("y").info("no")
    structlog.get_logger("x").error("yes")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["yes"]


def test_a_second_set_up_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    logger = structlog.get_logger("early")
    configure_logs("json", "info", first)
    configure_logs("json", "debug", second)
    logger.debug("once")
    assert first.getvalue() == ""
    assert json.loads(second.getvalue())["event"] == "once"
