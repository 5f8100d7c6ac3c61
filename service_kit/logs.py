"""Logs: structlog and the standard library's loggers, rendered alike, to stderr."""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog

LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(log_format: LogFormat = "auto", level: LogLevel = "info", stream: TextIO | None = None) -> None:
    """Set up all logging of the process; a second call replaces the first.

    "json" is one object a line, with `timestamp`, `level`, `logger` and `event`; "auto" is "text" on a terminal and
    "json" elsewhere. `stream` is stderr unless given.
    """
    stream = stream or sys.stderr
    on_terminal = stream.isatty()
    as_text = log_format == "text" or (log_format == "auto" and on_terminal)
    common: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    rendering: list[structlog.typing.Processor]
    if as_text:
        # Neither form shows local variables in a traceback, as structlog would by itself: they hold prompts.
        plain = structlog.dev.plain_traceback
        rendering = [structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=plain)]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name in ("opentelemetry.baggage", "opentelemetry.trace"):
        # They complain of a caller's headers, and quote them.
        logging.getLogger(name).setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *common,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
