"""Profiles of simulated backends in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from backend_service.engines.simulated import ModelSpeed, SimulatedSpeed
from backend_service.scheduling.fcfs import FirstComeFirstServed
from backend_service.step_model import IsolatedRates
from service_kit.step_time import StepModel
from simulator.profiles import BadProfile, Profile

SLOWEST_STEP_S = 3600.0
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_StepSeconds = Annotated[float, Field(gt=0, le=SLOWEST_STEP_S)]
_Coefficient = Annotated[float, Field(ge=0, le=SLOWEST_STEP_S)]
_Correction = Annotated[float, Field(ge=-SLOWEST_STEP_S, le=SLOWEST_STEP_S)]
_Rows = Annotated[int, Field(ge=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Table(_Strict):
    """See `SimulatedSpeed`."""

    kind: Literal["table"]
    prefill_tokens_per_s: _Positive
    decode_step_s: Annotated[dict[_Rows, _StepSeconds], Field(min_length=1)]
    reported_decode_tokens_per_s: _Positive | None = None

    @classmethod
    def of(cls, speed: SimulatedSpeed) -> _Table:
        return cls(
            kind="table",
            prefill_tokens_per_s=speed.prefill_tokens_per_s,
            decode_step_s=dict(speed.decode_step_s),
            reported_decode_tokens_per_s=speed.reported_decode_tokens_per_s,
        )

    def speed(self) -> SimulatedSpeed:
        return SimulatedSpeed(self.prefill_tokens_per_s, self.decode_step_s, self.reported_decode_tokens_per_s)


class _Model(_Strict):
    """See `ModelSpeed`."""

    kind: Literal["step_model"]
    prefill_tokens_per_s: _Positive
    decode_tokens_per_s: _Positive
    base_s: _Coefficient
    per_token_s: _Coefficient
    per_row_s: _Coefficient
    per_attended_s: _Coefficient
    samples: Annotated[int, Field(ge=0)] = 0
    residual_p90_s: _Coefficient = 0.0
    row_corrections_s: tuple[tuple[_Rows, _Correction], ...] = ()

    @classmethod
    def of(cls, speed: ModelSpeed) -> _Model:
        model, rates = speed.model, speed.rates()
        return cls(
            kind="step_model",
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            base_s=model.base_s,
            per_token_s=model.per_token_s,
            per_row_s=model.per_row_s,
            per_attended_s=model.per_attended_s,
            samples=model.samples,
            residual_p90_s=model.residual_p90_s,
            row_corrections_s=model.row_corrections_s,
        )

    def speed(self) -> ModelSpeed:
        if any(low >= high for (low, _), (high, _) in pairwise(self.row_corrections_s)):
            raise BadProfile("speed.row_corrections_s is not rising in rows; sort it, and give each number once")
        model = StepModel(
            self.base_s,
            self.per_token_s,
            self.per_row_s,
            self.per_attended_s,
            self.samples,
            self.residual_p90_s,
            self.row_corrections_s,
        )
        return ModelSpeed(model, IsolatedRates(self.prefill_tokens_per_s, self.decode_tokens_per_s))


class _Entry(_Strict):
    """See `Profile`, which says what is allowed."""

    speed: Annotated[_Table | _Model, Field(discriminator="kind")]
    max_active: int = 4
    max_active_auto: bool = False
    kv_tokens: int = 65_536
    step_tokens: int = 512
    step_target_s: float | None = None
    scheduling: str = FirstComeFirstServed.name
    source: str = ""

    @classmethod
    def of(cls, profile: Profile) -> _Entry:
        match profile.speed:
            case SimulatedSpeed():
                speed: _Table | _Model = _Table.of(profile.speed)
            case ModelSpeed():
                speed = _Model.of(profile.speed)
            case other:
                raise BadProfile(f"a speed of type {type(other).__name__} has no form in a file; use a step model")
        return cls(speed=speed, **{name: getattr(profile, name) for name in _RULES})

    def profile(self) -> Profile:
        rules: dict[str, Any] = {name: getattr(self, name) for name in _RULES}
        return Profile(self.speed.speed(), **rules)


_RULES = tuple(name for name in _Entry.model_fields if name != "speed")
_ENTRIES = TypeAdapter(dict[str, _Entry])


def save_profiles(path: Path, profiles: Mapping[str, Profile]) -> None:
    """Write backends by name, to be read again by `load_profiles`. Raises `BadProfile` when that cannot be."""
    entries = {name: _Entry.of(profile).model_dump(mode="json") for name, profile in profiles.items()}
    try:
        path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadProfile(f"{path} cannot be written: {error.strerror}; choose another place") from error


def load_profiles(path: Path) -> dict[str, Profile]:
    """Backends by name, at least one. Raises `BadProfile` that names the file, the place in it and what is allowed."""
    try:
        entries = _ENTRIES.validate_json(path.read_bytes())
    except OSError as error:
        raise BadProfile(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadProfile(f"{path}: {_first_problem(error)}") from error
    if not entries:
        raise BadProfile(f"{path} has no backend; give one at least")
    profiles = {}
    for name, entry in entries.items():
        try:
            profiles[name] = entry.profile()
        except BadProfile as error:
            raise BadProfile(f"{path}: {name}: {error}") from error
    return profiles


def _first_problem(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False)
    place = ".".join(str(part) for part in first["loc"])
    told = f"{place}: {first['msg']}" if place else str(first["msg"])
    return f"{told}, and {len(others)} more" if others else told
