"""The file with every request."""

from __future__ import annotations

import csv
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from phaseroute.bench.requests_csv import COLUMNS, write_csv
from tests.unit.clients_bench.runs import lost, run_of, served


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_an_answer_is_a_line_with_every_column(tmp_path: Path):
    item = served(
        7, "gpu", arrived_s=0.35, ttft_s=0.1, finish_s=1 / 3, predicted_ttft_s=0.2, predicted_finish_s=0.4,
        gaps_s=(0.1, 0.3, 0.2), workload="chat",
    )  # fmt: skip
    write_csv(tmp_path / "r.csv", [run_of(item, scenario="article8", policy="predictive", run=2, simulated=True)])
    (row,) = read(tmp_path / "r.csv")
    assert row == {
        "scenario": "article8", "run": "2", "policy": "predictive", "index": "7", "arrival_s": "0.35", "backend": "gpu",
        "code": "OK", "workload": "chat", "prompt_tokens": "100", "cached_tokens": "40", "new_tokens": "10",
        "predicted_ttft_s": "0.2", "ttft_s": "0.1", "predicted_finish_s": "0.4", "finish_s": "0.3333333333333333",
        "inter_token_p50_s": "0.2", "inter_token_max_s": "0.3", "simulated": "1",
    }  # fmt: skip
    assert tuple(row) == COLUMNS


def test_what_is_not_known_is_empty(tmp_path: Path):
    write_csv(tmp_path / "r.csv", [run_of(served(0), lost(1, "DEADLINE_EXCEEDED"))])
    answered, failed = read(tmp_path / "r.csv")
    assert (answered["predicted_finish_s"], answered["inter_token_max_s"], answered["simulated"]) == ("", "", "0")
    assert (failed["code"], failed["backend"], failed["ttft_s"], failed["finish_s"]) == (
        "DEADLINE_EXCEEDED",
        "",
        "",
        "",
    )


@given(st.text(), st.floats(0, 1e6), st.floats(0, 1e6))
def test_names_and_numbers_come_back_exactly(tmp_path_factory, name: str, ttft_s: float, finish_s: float):
    path = tmp_path_factory.mktemp("csv") / "r.csv"
    name = name.replace("\0", "").encode(errors="replace").decode()
    write_csv(path, [run_of(served(0, ttft_s=ttft_s, finish_s=finish_s, workload=name))])
    (row,) = read(path)
    assert (row["workload"], float(row["ttft_s"]), float(row["finish_s"])) == (name, ttft_s, finish_s)


def test_it_is_written_as_a_whole(tmp_path: Path):
    write_csv(tmp_path / "r.csv", [run_of(served(0))])
    write_csv(tmp_path / "r.csv", [run_of(served(0), served(1))])
    assert len(read(tmp_path / "r.csv")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]
