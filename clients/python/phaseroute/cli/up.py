"""`phaseroute up`: backends and a router on this machine, until it is told to stop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from phaseroute.cli import signals
from phaseroute.cli.tables import plain_table
from phaseroute.local.child import StartFailed
from phaseroute.local.plan import BadPlan, StackPlan, load_plan, make_plan, unequal_pair
from phaseroute.local.stack import Member, Phase, Stack

DEFAULT_CONFIG = Path("phaseroute.toml")

_STYLES = {Phase.READY: "green", Phase.FAILED: "red"}


def up(
    config: Annotated[
        Path | None, typer.Option(help="What to start; ./phaseroute.toml if there is one, else two llama.cpp backends.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The router's port; 50051 unless the file says otherwise.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the logs go; a new temporary directory.")] = None,
) -> None:
    """Start backends and a router, and stop them all on Ctrl-C."""
    console = Console(highlight=False, emoji=False)
    path = config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)
    plan = load_plan(path, port) if path else make_plan(unequal_pair(), {}, port)
    console.print(f"Starting what {path} says." if path else "Starting two unequal llama.cpp backends on this machine.")
    directory = run_directory(run_dir)
    console.print(f"Logs: {directory}", soft_wrap=True)
    try:
        signals.run(_serve(plan, directory, console))
    except signals.Interrupted:
        console.print("Stopped.")


def run_directory(wanted: Path | None = None) -> Path:
    """A directory for logs, made if it is not there. Raises `BadPlan` when it cannot be."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="phaseroute-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadPlan(f"{wanted} cannot hold the logs: {error.strerror}. Choose another --run-dir.") from error
    return wanted


async def _serve(plan: StackPlan, run_dir: Path, console: Console) -> None:
    board = StackBoard(console, tell_stopping=True)
    async with Stack(plan, run_dir, board.update) as stack:
        with board.live():
            await stack.start_backends()
            await stack.start_router()
        console.print(
            f'Ready. Try: phaseroute generate "Tell me a story" --explain --target {plan.router.address}\n'
            "Ctrl-C stops everything; answers in flight may finish, a second Ctrl-C cuts them off.",
            soft_wrap=True,
        )
        while True:
            ended = await stack.next_end()
            left = [member for member in stack.members.values() if member.phase is Phase.READY]
            if ended.service == plan.router or len(left) < 2:
                raise StartFailed(f"{ended.obituary()} Nothing is left to serve with.")
            console.print(f"{ended.obituary()} The others go on.", style="yellow", soft_wrap=True)


class StackBoard:
    """Shows a stack's state: a live table on a terminal, a line for each change elsewhere."""

    def __init__(self, console: Console, *, tell_stopping: bool) -> None:
        self._console = console
        self._tell_stopping = tell_stopping
        self._members: dict[str, Member] = {}
        self._live = False

    def update(self, member: Member) -> None:
        """A member entered a phase."""
        self._members[member.service.name] = member
        if not self._live and (self._tell_stopping or member.phase not in (Phase.STOPPING, Phase.STOPPED)):
            self._console.print(
                f"{member.service.name}: {member.phase.value} (pid {member.pid}, {member.service.address})",
                soft_wrap=True,
            )

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the table while the block runs; its last state stays on the screen."""
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=5):
            self._live = True
            try:
                yield
            finally:
                self._live = False

    def _table(self) -> RenderableType:
        table = plain_table("service", "address", "pid", "state", "for", left=("service", "address", "state"))
        now_s = time.monotonic()
        for member in list(self._members.values()):
            state = Text(member.phase.value, style=_STYLES.get(member.phase, "yellow"))
            address = Text(member.service.address)
            table.add_row(member.service.name, address, str(member.pid), state, f"{now_s - member.since_s:.0f} s")
        return table
