"""Recorded requests: a CSV file with a header, or JSON lines, one request a row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from phaseroute.scenarios.bounds import MOST_TOKENS, BadScenario
from phaseroute.scenarios.planned import Planned, Scenario

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Files that end so are read and written as JSON lines; all others as CSV."""
LATEST_S = 1e9

_Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
_Limit = Annotated[float, Field(gt=0, le=LATEST_S)]


class _Row(BaseModel):
    """A request; see `Planned`. `warm` says that every backend holds its prefix before the first arrival."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_s: Annotated[float, Field(ge=0, le=LATEST_S)]
    prompt_tokens: Annotated[int, Field(ge=2, le=MOST_TOKENS)]
    max_new_tokens: _Tokens
    new_tokens: _Tokens
    prefix: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    prefix_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    workload: Annotated[str, Field(max_length=200)] = ""
    batch: bool = False
    deadline_s: _Limit | None = None
    ttft_slo_s: _Limit | None = None
    warm: bool = False

    @model_validator(mode="after")
    def _fits(self) -> _Row:
        if self.new_tokens > self.max_new_tokens:
            raise ValueError(
                f"new_tokens is {self.new_tokens}; give 1 to max_new_tokens, which is {self.max_new_tokens}"
            )
        if self.prefix_tokens >= self.prompt_tokens:
            raise ValueError(
                f"prefix_tokens is {self.prefix_tokens}; give less than prompt_tokens, which is {self.prompt_tokens}"
            )
        return self


COLUMNS = tuple(_Row.model_fields)
"""In the order in which they are written; a file may have them in any, without those that have a default."""


def read_trace(path: Path) -> Scenario:
    """The requests of a file. Raises `BadScenario` that names the file, the row, the column and what is allowed; also
    for rows that are not in order of arrival, since that may be a sign of a wrong file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(_json_rows(path, file) if path.suffix in JSON_SUFFIXES else _csv_rows(path, file))
    except OSError as error:
        raise BadScenario(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadScenario(f"{path} is no UTF-8 text; save it as such") from error
    if not rows:
        raise BadScenario(f"{path} has no requests; give one row at least")
    for (_, earlier), (number, later) in pairwise(rows):
        if later.at_s < earlier.at_s:
            raise BadScenario(
                f"{path}, row {number}, at_s: {later.at_s:g} comes before {earlier.at_s:g} of the row above; "
                f"sort the rows by at_s"
            )
    return Scenario(
        name=f"trace:{path.stem}",
        description=f"{len(rows):,} recorded requests from {path.name}",
        requests=tuple(Planned(**{name: getattr(row, name) for name in COLUMNS if name != "warm"}) for _, row in rows),
        warm=tuple(dict.fromkeys(row.prefix for _, row in rows if row.warm and row.prefix >= 0)),
    )


def write_trace(path: Path, scenario: Scenario) -> None:
    """Save a scenario, all but its name and its incidents, to be read again. Raises `OSError`."""
    rows = [
        {name: getattr(planned, name) for name in COLUMNS if name != "warm"} | {"warm": planned.prefix in scenario.warm}
        for planned in scenario.requests
    ]
    draft = path.with_name(f"{path.name}.part")
    with draft.open("w", encoding="utf-8", newline="") as file:
        if path.suffix in JSON_SUFFIXES:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(
                {name: int(value) if isinstance(value, bool) else value for name, value in row.items()} for row in rows
            )
    draft.replace(path)


def _csv_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, _Row]]:
    """With row numbers as an editor shows them. Empty cells count as left out."""
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, [])]
    required = [name for name, each in _Row.model_fields.items() if each.is_required()]
    missing = [name for name in required if name not in header]
    if missing:
        raise BadScenario(f"{path}, row 1: no column {', '.join(missing)}; the header must name {', '.join(required)}")
    unknown = [name for name in header if name not in COLUMNS]
    if unknown or len(set(header)) < len(header):
        odd = unknown or sorted({name for name in header if header.count(name) > 1})
        raise BadScenario(
            f"{path}, row 1: column {', '.join(map(repr, odd))}; give each of {', '.join(COLUMNS)} once at most"
        )
    try:
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise BadScenario(
                    f"{path}, row {reader.line_num}: {len(cells)} cells; give {len(header)}, as the header has"
                )
            given = {name: cell.strip() for name, cell in zip(header, cells, strict=True) if cell.strip()}
            yield reader.line_num, _row(path, reader.line_num, given)
    except csv.Error as error:
        raise BadScenario(f"{path}, row {reader.line_num}: {error}") from error


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, _Row]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadScenario(f"{path}, row {number}: no JSON: {error}; write one object a line") from error
        if not isinstance(given, dict):
            raise BadScenario(f"{path}, row {number}: {type(given).__name__} is no request; write one object a line")
        yield number, _row(path, number, given)


def _row(path: Path, number: int, given: Mapping[str, Any]) -> _Row:
    try:
        return _Row.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        column = "".join(f", {part}" for part in first["loc"])
        shown = f" {first['input']!r}:" if column and first["type"] not in ("missing", "extra_forbidden") else ""
        raise BadScenario(f"{path}, row {number}{column}:{shown} {_told(first['type'], first['msg'])}") from error


def _told(kind: str, message: str) -> str:
    match kind:
        case "extra_forbidden":
            return f"unknown; there are {', '.join(COLUMNS)}"
        case "value_error":
            return message.removeprefix("Value error, ")
        case _:
            return message[:1].lower() + message[1:]
