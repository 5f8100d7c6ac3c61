"""Values in place of a scenario's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from phaseroute.scenarios.arrivals import parse_arrivals
from phaseroute.scenarios.bounds import MOST_TOKENS, BadScenario
from phaseroute.scenarios.lengths import Fixed, Lengths, parse_lengths
from phaseroute.scenarios.prefixes import parse_prefixes
from phaseroute.scenarios.preset import Preset
from phaseroute.scenarios.workloads import LEAST_PROMPT_TOKENS, LONGEST_LIMIT_S, Workload

MOST_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions:
    """What to put in place of a scenario's own values; None leaves them."""

    requests: int | None = None
    """How many arrive."""
    arrivals: str | None = None
    """Another process, as `parse_arrivals` takes it."""
    gap_s: float | None = None
    rate: float | None = None
    cv: float | None = None
    """These three, of a process that has such a value."""
    prompts: str | None = None
    """Another distribution of prompt lengths, as `parse_lengths` takes it; so are the next two."""
    budgets: str | None = None
    answers: str | None = None
    prompt_tokens: int | None = None
    """All prompts are so long."""
    new_tokens: int | None = None
    """All answers are so long; their budget too, where they run to it and no other is given, or where it is less."""
    max_new_tokens: int | None = None
    """The budget of all answers."""
    sharing: str | None = None
    """Another pattern of shared prefixes, as `parse_prefixes` takes it."""
    prefix_tokens: int | None = None
    hit_rate: float | None = None
    prefixes: int | None = None
    """These three, of a pattern that has such a value."""
    deadline_s: float | None = None
    ttft_slo_s: float | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}


def changed(name: str, preset: Preset, options: ScenarioOptions) -> Preset:
    """The preset of this name with what the options give. Raises `BadScenario`."""
    requests, arrivals, prefixes = preset.requests, preset.arrivals, preset.prefixes
    if options.requests is not None:
        requests = ranged("requests", options.requests, 1, MOST_REQUESTS)
    if options.arrivals is not None:
        with _blaming("arrivals"):
            arrivals = parse_arrivals(options.arrivals)
    if options.sharing is not None:
        with _blaming("sharing"):
            prefixes = parse_prefixes(options.sharing)
    given = options.given()
    told = f"; but {', '.join(f'{option} {value}' for option, value in given.items())}" if given else ""
    return replace(
        preset,
        description=preset.description + told,
        requests=requests,
        arrivals=_with(f"arrivals of {name}", arrivals, options, {"gap_s": "gap_s", "rate": "rate", "cv": "cv"}),
        prefixes=_with(
            f"prefixes of {name}",
            prefixes,
            options,
            {"prefix_tokens": "tokens", "hit_rate": "hit_rate", "prefixes": "prefixes"},
        ),
        workloads=tuple(_sized(workload, options) for workload in preset.workloads),
    )


@contextmanager
def _blaming(option: str) -> Iterator[None]:
    """A `BadScenario` that comes out of this block is due to that option."""
    try:
        yield
    except BadScenario as error:
        error.option = error.option or option
        raise


def _with(what: str, value: Any, options: ScenarioOptions, names: Mapping[str, str]) -> Any:
    """A frozen dataclass with some of its fields as options say, by option and field."""
    known = {each.name for each in fields(value)}
    for option, name in names.items():
        given = getattr(options, option)
        if given is not None:
            if name not in known:
                kind = type(value).__name__.lower()
                raise BadScenario(f"there is no {option} to the {what}: they are {kind}; choose others", option)
            with _blaming(option):
                value = replace(value, **{name: given})
    return value


def _sized(workload: Workload, options: ScenarioOptions) -> Workload:
    prompts, budgets, answers = workload.prompts, workload.budgets, workload.answers
    if options.prompts is not None:
        with _blaming("prompts"):
            prompts = parse_lengths("prompts", options.prompts)
    if options.prompt_tokens is not None:
        prompts = Fixed(ranged("prompt_tokens", options.prompt_tokens, LEAST_PROMPT_TOKENS, MOST_TOKENS))
    if options.budgets is not None:
        with _blaming("budgets"):
            budgets = parse_lengths("budgets", options.budgets)
    if options.max_new_tokens is not None:
        budgets = Fixed(ranged("max_new_tokens", options.max_new_tokens, 1, MOST_TOKENS))
    if options.answers is not None:
        with _blaming("answers"):
            answers = parse_lengths("answers", options.answers)
    if options.new_tokens is not None:
        budgets, answers = _answered(options, budgets, answers, options.new_tokens)
    return replace(
        workload,
        prompts=prompts,
        budgets=budgets,
        answers=answers,
        deadline_s=_limit("deadline_s", options.deadline_s, workload.deadline_s),
        ttft_slo_s=_limit("ttft_slo_s", options.ttft_slo_s, workload.ttft_slo_s),
    )


def _answered(
    options: ScenarioOptions, budgets: Lengths, answers: Lengths | None, new_tokens: int
) -> tuple[Lengths, Lengths | None]:
    """Budgets and answers where all answers have this length."""
    most = budgets.tokens if isinstance(budgets, Fixed) and options.max_new_tokens is not None else MOST_TOKENS
    new = Fixed(ranged("new_tokens", new_tokens, 1, most))
    runs_to_budget = answers is None and options.budgets is None and options.max_new_tokens is None
    if runs_to_budget or (isinstance(budgets, Fixed) and new.tokens >= budgets.tokens):
        return new, None
    return budgets, new


def _limit(name: str, given: float | None, own: float | None) -> float | None:
    if given is None:
        return own
    if not 0 < given <= LONGEST_LIMIT_S:
        raise BadScenario(f"{name} is {given:g}; give seconds above 0, up to {LONGEST_LIMIT_S:g}", name)
    return given


def ranged(name: str, value: int, low: int, high: int) -> int:
    """The value of the option of this name, if it is from `low` to `high`. Raises `BadScenario`."""
    if not low <= value <= high:
        raise BadScenario(f"{name} is {value}; give {low} to {high}", name)
    return value
