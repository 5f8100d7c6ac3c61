"""The command: its parts, and what their failures look like on a terminal."""

from __future__ import annotations

import sys
from typing import Any

import typer
from grpc import StatusCode
from rich.console import Console
from typer.core import TyperGroup

from phaseroute.bench.output import BadFolder
from phaseroute.cli import ask
from phaseroute.cli.bench import bench
from phaseroute.cli.demo import demo
from phaseroute.cli.signals import Interrupted
from phaseroute.cli.simulate import simulate
from phaseroute.cli.token import token_app
from phaseroute.cli.up import up
from phaseroute.errors import PhaserouteError
from phaseroute.local.child import StartFailed
from phaseroute.local.plan import BadPlan

INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


class Commands(TyperGroup):
    """Turns what a command raises into one line and an exit code; usage errors exit with 2 on their own."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except (PhaserouteError, StartFailed, BadPlan, BadFolder) as error:
            Console(stderr=True, highlight=False, emoji=False).print(
                _advice(error), style="red", markup=False, soft_wrap=True
            )
            raise typer.Exit(1) from error
        except Interrupted as stopped:
            raise typer.Exit(stopped.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Routes LLM requests between unequal backends to the one that finishes soonest.",
)
app.command()(ask.generate)
app.command()(ask.route)
app.command()(ask.backends)
app.command()(up)
app.command()(demo)
app.command()(bench)
app.command()(simulate)
app.add_typer(token_app, name="token")


def _advice(error: Exception) -> str:
    nobody_there = isinstance(error, PhaserouteError) and error.code is StatusCode.UNAVAILABLE and not error.reason
    return f"{error} `phaseroute up` starts one here." if nobody_there else str(error)


def main() -> None:
    """Entry point."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="phaseroute")
