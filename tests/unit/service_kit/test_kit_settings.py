from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from service_kit.faults import StartupFailed
from service_kit.settings import Settings


class Sample(Settings, env_prefix="PHASEROUTE_SAMPLE_", cli_prog_name="sample"):
    """Serves samples."""

    max_active: int = Field(4, ge=1, description="Largest batch")
    backend: list[str] = Field(default=[], description="A backend as name=target; repeat for more")
    cpus: list[int] | None = Field(None, description="CPUs to run on")
    fast: bool = Field(False, description="Hurry")
    rates: dict[str, float] = Field(default={}, description="Tokens per second by batch size")


class Needy(Settings, env_prefix="PHASEROUTE_NEEDY_"):
    model: str = Field(description="Model file")


def written(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def failure(argv: list[str], settings: type[Settings] = Sample) -> str:
    with pytest.raises(StartupFailed) as caught:
        settings.load(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    settings = Sample.load([])
    assert (settings.max_active, settings.backend, settings.fast, settings.log_format) == (4, [], False, "auto")


@pytest.mark.parametrize(("suffix", "text"), [("toml", "max_active = 7\nfast = true"), ("yaml", "max_active: 7")])
def test_flags_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, text: str
) -> None:
    config = ["--config", written(tmp_path, f"s.{suffix}", text)]
    assert Sample.load(config).max_active == 7
    monkeypatch.setenv("PHASEROUTE_SAMPLE_MAX_ACTIVE", "8")
    assert Sample.load(config).max_active == 8
    assert Sample.load([*config, "--max-active", "9"]).max_active == 9
    assert Sample.load([*config, "--max-active=9"]).cpus is None


def test_the_file_can_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEROUTE_SAMPLE_CONFIG", written(tmp_path, "s.yml", "rates: {'1': 2.5}"))
    assert Sample.load([]).rates == {"1": 2.5}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert Sample.load(["--config", written(tmp_path, "s.yaml", "")]).max_active == 4


def test_lists_from_repeated_flags_commas_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["cpu=127.0.0.1:1", "gpu=127.0.0.1:2"]
    assert Sample.load(["--backend", both[0], "--backend", both[1]]).backend == both
    assert Sample.load(["--backend", ",".join(both)]).backend == both
    assert Sample.load(["--config", written(tmp_path, "s.toml", f"backend = {both}")]).backend == both
    monkeypatch.setenv("PHASEROUTE_SAMPLE_BACKEND", f" {both[0]}, {both[1]}")
    monkeypatch.setenv("PHASEROUTE_SAMPLE_CPUS", "0")
    assert Sample.load([]).backend == both
    assert Sample.load([]).cpus == [0]
    monkeypatch.setenv("PHASEROUTE_SAMPLE_BACKEND", '["a,b=c"]')
    assert Sample.load([]).backend == ["a,b=c"]


@given(names=st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}=[a-z]{1,9}:[0-9]{1,5}", fullmatch=True), min_size=1))
def test_a_list_flag_is_what_was_typed(names: list[str]) -> None:
    assert Sample.load([part for name in names for part in ("--backend", name)]).backend == names


def test_boolean_flags() -> None:
    assert Sample.load(["--fast"]).fast
    assert not Sample.load(["--fast", "--no-fast"]).fast


def test_help_has_flags_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Sample.load(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for part in ("usage: sample", "Serves samples.", "--max-active", "Largest batch", "--drain-grace-s", "--config"):
        assert part in text


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-actve", "3"], ["--max-actve", "did you mean --max-active?"]),
        (["--backends=a=b"], ["--backends", "did you mean --backend?"]),
        (["--qqq"], ["--qqq", "known are", "--max-active"]),
        (["--max"], ["--max;", "--max-active"]),
        (["stray"], ["stray", "every setting is a flag"]),
        (["--max-active"], ["--max-active", "--help"]),
        (["--max-active", "0"], ["--max-active is '0'", "greater than or equal to 1"]),
        (["--max-active", "two", "--log-level", "loud"], ["--max-active is 'two'", "--log-level is 'loud'"]),
        (["--rates", "1=fast"], ["--rates.1 is 'fast'", "number"]),
        (["--config", "/nonexistent/s.toml"], ["/nonexistent/s.toml", "No such file"]),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(argv: list[str], parts: list[str]) -> None:
    message = failure(argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("s.toml", "max-active = 3", ['"max-active"', "s.toml", "did you mean max_active?"]),
        ("s.yaml", "nonsense: 1", ['"nonsense"', "known are", "max_active"]),
        ("s.yaml", "config: other.yaml", ['"config"']),
        ("s.yaml", "max_active: -3", ["max_active in", "s.yaml is -3", "greater than or equal to 1"]),
        ("s.yaml", "max_active: [", ["s.yaml", "cannot be parsed"]),
        ("s.toml", "max_active", ["s.toml", "cannot be parsed"]),
        ("s.toml", "a = '\\xff'\n\xff\xfe", ["s.toml", "cannot be parsed"]),
        ("s.yaml", "- 1", ["s.yaml", "name: value"]),
        ("s.json", "{}", ["s.json", ".toml, .yaml or .yml"]),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path, name: str, text: str, parts: list[str]) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    message = failure(["--config", str(path)])
    for part in parts:
        assert part in message


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEROUTE_SAMPLE_MAX_ACTIVE", "many")
    assert "PHASEROUTE_SAMPLE_MAX_ACTIVE is 'many'" in failure([])
    monkeypatch.setenv("PHASEROUTE_SAMPLE_MAX_ACTIVE", "3")
    monkeypatch.setenv("PHASEROUTE_SAMPLE_RATES", "1=2")
    assert "PHASEROUTE_SAMPLE_RATES is '1=2'; write it as JSON" in failure([])


def test_a_missing_setting_names_its_three_ways() -> None:
    message = failure([], Needy)
    for part in ("--model is required", "PHASEROUTE_NEEDY_MODEL", "model in the --config file"):
        assert part in message


def test_settings_are_frozen_and_made_directly_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEROUTE_SAMPLE_MAX_ACTIVE", "8")
    settings = Sample(backend=["a=b"])
    assert settings.max_active == 4
    with pytest.raises(ValidationError):
        settings.max_active = 5  # type: ignore[misc]
