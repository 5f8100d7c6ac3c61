"""A page of tables in Markdown, and the same figures for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a heading; numbers are printed with three digits that count."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """With a line for each row."""
        lines = [self.columns, ("---",) * len(self.columns), *(tuple(map(cell, row)) for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its answer."""

    name: str
    """By which it is asked for."""
    title: str
    before: str
    """What was played."""
    tables: tuple[Table, ...]
    after: str = ""
    """What the tables say."""
    figures: dict[str, object] = field(default_factory=dict)
    """For the JSON line."""

    def markdown(self) -> str:
        """Title, text, tables, text."""
        parts = [f"## {self.title}", self.before, *(table.markdown() for table in self.tables), self.after]
        return "\n\n".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that was aimed at."""

    what: str
    aim: str
    value: float | str
    met: bool


def cell(value: Cell) -> str:
    """As it stands in a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        size = abs(value)
        return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"
    return str(value)


def targets_table(targets: Sequence[Target]) -> Table:
    """All of them, and whether they are met."""
    return Table(
        ("figure", "aim", "got", "met"),
        tuple((each.what, each.aim, each.value, "yes" if each.met else "**no**") for each in targets),
    )
