"""A service's settings: flags over environment over file over defaults."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from service_kit.calls import CallLimits
from service_kit.certificates import ServerTls
from service_kit.channels import ConnectionLimits
from service_kit.faults import StartupFailed
from service_kit.logs import LogFormat, LogLevel
from service_kit.protection import Protection
from service_kit.serve import DRAIN_GRACE_S

ALMOST_AS_NEAR = 0.15
"""Names that are less like a mistyped one than the nearest by this much are not suggested."""


class Settings(BaseSettings):
    """Base of each service's settings: `class RouterSettings(Settings, env_prefix="PHASEROUTE_ROUTER_",
    cli_prog_name="phaseroute-router")`.

    A field's description is its help; the class docstring heads the help. Made directly, as in tests, an instance has
    what it is given and the defaults; only `load` reads flags, environment and file.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    config: Path | None = Field(None, description="Settings file, .toml or .yaml, with the other flags' names as keys")
    listen: str = Field("127.0.0.1:50051", description="Address to serve on, host:port or unix:path")
    drain_grace_s: float = Field(
        DRAIN_GRACE_S, ge=0, description="Seconds that calls in flight get to finish when the process is told to stop"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate to serve TLS with, chain included")
    tls_key: Path | None = Field(None, description="PEM key of --tls-cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the CA that vouches for clients; they must then show a certificate"
    )
    tokens: Path | None = Field(
        None, description="TOML file of who may call, by the hashes of their tokens; default: everybody may"
    )
    admin: bool = Field(True, description="Serve the calls that change something, such as DrainBackend")
    reflection: bool = Field(True, description="Let tools such as grpcurl ask what there is to call")
    max_message_mb: int = Field(
        16, ge=1, le=1024, description="Largest request, in MiB; a router's at most that of its backends"
    )
    max_calls: int = Field(10_000, ge=1, description="Calls at a time, status and watches apart; more are refused")
    max_observers: int = Field(
        256, ge=2, description="Calls at a time that ask for or watch the status; more are refused"
    )
    max_connections: int = Field(4096, ge=1, description="Connections at a time; more are closed at once")
    max_streams: int = Field(
        8192,
        ge=1,
        description="Calls at a time on one connection; more wait in the client. A router has one to each backend",
    )
    idle_connection_s: float = Field(
        600.0, ge=1, le=86_400, description="Seconds without a call after which a connection is closed"
    )
    log_format: LogFormat = Field("auto", description="auto: text on a terminal, JSON lines elsewhere")
    log_level: LogLevel = Field("info", description="Least severity that is logged")

    @property
    def protection(self) -> Protection:
        """What `Server` takes."""
        return Protection(
            tls=ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert and self.tls_key else None,
            token_file=self.tokens,
            admin=self.admin,
            reflection=self.reflection,
            connections=ConnectionLimits(
                message_bytes=self.max_message_mb * 1024 * 1024,
                connections=self.max_connections,
                streams=self.max_streams,
                idle_s=self.idle_connection_s,
            ),
            calls=CallLimits(calls=self.max_calls, observers=self.max_observers),
        )

    @model_validator(mode="after")
    def _tls_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together; give both, or neither")
        if self.tls_client_ca and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key; give them too")
        return self

    @classmethod
    def load(cls, argv: Sequence[str]) -> Self:
        """Settings from flags (without the program's name), environment and the `--config` file.

        Repeat a list's flag, or separate its items by commas, which also works in the environment. A table in the file
        is replaced as a whole by a flag or variable for it. Raises `StartupFailed`, whose message names what is wrong,
        and where. `--help` prints and raises `SystemExit`.
        """
        flags = cls._from_flags(argv)
        environment = cls._from_environment()
        path = flags.get("config") or environment.get("config")
        file = cls._from_file(Path(path)) if path else {}
        try:
            return cls(**{**file, **environment, **flags})
        except ValidationError as error:
            origins = {
                **{name: f"{name} in {path}" for name in file},
                **{name: cls._variable(name) for name in environment},
                **{name: _flag(name) for name in flags},
            }
            raise StartupFailed(" ".join(cls._sentence(problem, origins) for problem in error.errors())) from error

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: `load` puts the sources together, because it must know which of them a value is from."""
        return (init_settings,)

    @classmethod
    def _from_flags(cls, argv: Sequence[str]) -> dict[str, Any]:
        try:
            return CliSettingsSource[Any](cls, cli_parse_args=list(argv))()
        except SettingsError as error:
            problem = str(error).removeprefix("error parsing CLI: ")
        unknown = problem.removeprefix("unrecognized arguments: ")
        if unknown == problem:
            raise StartupFailed(f"{problem}; see --help.")
        first = unknown.split()[0].partition("=")[0]
        if not first.startswith("-"):
            raise StartupFailed(f"Unexpected argument {first}; every setting is a flag, see --help.")
        raise StartupFailed(f"Unknown flag {first}; {_nearest(first, [_flag(name) for name in cls.model_fields])}")

    @classmethod
    def _from_environment(cls) -> dict[str, Any]:
        return _Environment(cls)()

    @classmethod
    def _from_file(cls, path: Path) -> dict[str, Any]:
        content = _read(path)
        known = cls.model_fields.keys() - {"config"}
        for key in content:
            if key not in known:
                raise StartupFailed(f'Unknown key "{key}" in {path}; {_nearest(str(key), known)}')
        return content

    @classmethod
    def _sentence(cls, problem: ErrorDetails, origins: Mapping[str, str]) -> str:
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        if not problem["loc"]:
            return f"{message}."
        name = str(problem["loc"][0])
        if problem["type"] == "missing" and len(problem["loc"]) == 1:
            return f"{_flag(name)} is required: set it, {cls._variable(name)}, or {name} in the --config file."
        inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"][1:])
        return f"{origins.get(name, name)}{inside} is {_brief(problem['input'])}: {message}."

    @classmethod
    def _variable(cls, name: str) -> str:
        return f"{cls.model_config['env_prefix']}{name}".upper()


class _Environment(EnvSettingsSource):
    """Environment variables in which a list may be written with commas instead of as JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if _is_list(field.annotation) and not value.lstrip().startswith("["):
            return [item.strip() for item in value.split(",")]
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError as error:
            variable = f"{self.env_prefix}{field_name}".upper()
            raise StartupFailed(f"{variable} is {_brief(value)}; write it as JSON.") from error


def _is_list(annotation: object) -> bool:
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return any(get_origin(member) in (list, tuple) for member in members)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".toml":
                content = tomllib.loads(text)
            case ".yaml" | ".yml":
                content = yaml.safe_load(text) or {}
            case _:
                raise StartupFailed(f"{path}: the suffix says nothing about the format; use .toml, .yaml or .yml.")
    except OSError as error:
        raise StartupFailed(f"{path} cannot be read: {error.strerror}; correct --config.") from error
    except (ValueError, yaml.YAMLError) as error:
        where = " ".join(str(error).split()).rstrip(" .^:")
        raise StartupFailed(f"{path} cannot be parsed: {where}.") from error
    if not isinstance(content, dict):
        raise StartupFailed(f"{path} holds a {type(content).__name__}; write settings as name: value.")
    return content


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _nearest(wrong: str, known: Collection[str]) -> str:
    near = sorted(name for name in known if name.startswith(wrong)) or difflib.get_close_matches(wrong, known, n=3)
    near = [name for name in near if _likeness(wrong, name) > _likeness(wrong, near[0]) - ALMOST_AS_NEAR]
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}."


def _likeness(wrong: str, name: str) -> float:
    return difflib.SequenceMatcher(None, name, wrong).ratio()


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
