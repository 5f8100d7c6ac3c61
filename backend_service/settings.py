"""What a backend can be told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from service_kit.settings import Settings

_OF_ONE_ENGINE = {
    "llama_cpp": {"n_gpu_layers", "kv_type", "flash_attention", "speculate", "draft_model"},
    "mlx": {"device", "weights"},
}
"""Settings that the other engines could not heed."""


MOST_ACTIVE = 64
"""Largest batch that can be set."""


def cache_directory() -> Path:
    """Where profiles and converted models are kept: $XDG_CACHE_HOME/phaseroute, ~/.cache/phaseroute by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "phaseroute"


class BackendSettings(Settings, env_prefix="PHASEROUTE_BACKEND_", cli_prog_name="phaseroute-backend"):
    """Serves one model on one device over gRPC."""

    listen: str = Field("127.0.0.1:50061", description="Address to serve on, host:port or unix:path")
    engine: Literal["llama_cpp", "mlx", "simulated"] = Field("llama_cpp", description="What computes the tokens")
    model: str = Field(
        "default",
        description="GGUF path, hf:owner/repo/file.gguf, or default: the packaged SmolLM2; with --engine mlx also an "
        "mlx-lm folder or hf:owner/repo",
    )
    model_name: str = Field("", description="Name that clients ask for; default: the file's own")
    max_active: int | Literal["auto"] = Field(
        4, description="Largest batch; auto: as large as the fitted step model says pays off"
    )
    max_active_limit: int = Field(
        16,
        ge=1,
        le=MOST_ACTIVE,
        description="--max-active auto: largest batch that may be chosen; the engine is built for it",
    )
    inter_token_target_ms: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="--max-active auto: longest time between two tokens of a stream; default: 100, or twice a decode "
        "step alone where that is more",
    )
    max_queued: int = Field(64, ge=0, le=10_000, description="Requests that may wait; more are refused")
    max_queued_tokens: int | None = Field(
        None,
        ge=0,
        description="Prompt and new tokens of the requests that may wait; more are refused; 0: no such bound; default: "
        "64 times the context",
    )
    scheduling: Literal["fair", "fcfs", "shortest_prefill_first", "priority"] = Field(
        "fair",
        description="Who is admitted first: clients in turn by what each asked for, requests by arrival, by the prompt "
        "left to compute, or interactive before batch",
    )
    promote_batch_after_s: float = Field(
        300.0,
        ge=0,
        allow_inf_nan=False,
        description="Scheduling by priority: interactive requests that come this long after a batch request no longer "
        "go before it; give more than a backlog takes",
    )
    kv_tokens: int = Field(4096, ge=256, description="KV cache size in tokens, shared by all requests")
    retained_tokens: int | None = Field(
        None,
        ge=0,
        description="Part of the KV cache that finished requests' prefixes may keep; default: 512 with llama.cpp, "
        "where every step pays for it, and all that is free with MLX, where none does",
    )
    step_tokens: int = Field(
        0, ge=0, le=512, description="Most tokens computed in one step; 0: as many as the target time allows"
    )
    step_target_ms: float | None = Field(
        None,
        ge=0,
        description="Longest time of a step with prefill in it, by the fitted step model; 0: no bound; default: 150, "
        "or four times a decode step alone where that is more",
    )
    threads: int = Field(
        1, ge=1, le=256, description="Threads that compute on a CPU; llama.cpp's spin, so never more than free cores"
    )
    cpus: str = Field("", description="Cores for the engine's threads, such as 0-3 or 0,2; default: all")
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="MLX: where to compute; auto: on a GPU if any")
    weights: Literal["auto", "stored", "float32", "bfloat16"] = Field(
        "auto",
        description="MLX: how to hold the weights; auto: float32 on a CPU, bfloat16 on CUDA, as stored on Metal",
    )
    n_gpu_layers: int = Field(0, ge=-1, description="llama.cpp: layers to put on the GPU; -1: all")
    kv_type: Literal["f16", "q8_0", "q4_0"] = Field("f16", description="llama.cpp: how KV cache cells are stored")
    flash_attention: Literal["on", "off"] = Field(
        "on",
        description="llama.cpp: off for faster decoding of long contexts on a CPU, but answers may then depend on the "
        "batch",
    )
    host_cache_mb: int = Field(
        512, ge=0, description="llama.cpp: host memory for prefixes that had to leave the KV cache, in MiB; 0: none"
    )
    max_unread_tokens: int = Field(
        1024, ge=1, description="Tokens of an answer that its client may leave unread for --unread-grace-s"
    )
    unread_grace_s: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds after which a request with more unread tokens is given up",
    )
    prefix_wait_s: float = Field(
        30.0, ge=0, description="Longest that a request waits for a prefix which another one is computing; 0: never"
    )
    speculate: Literal["off", "prompt_lookup", "draft"] = Field(
        "off", description="llama.cpp: guess tokens ahead, from the text so far or with a smaller model"
    )
    draft_model: str = Field(
        "", description="GGUF path or hf:owner/repo/file.gguf of the model that --speculate draft uses"
    )
    guesses: int = Field(4, ge=1, le=16, description="Tokens to guess ahead for each request")
    measure: bool = Field(False, description="Measure the isolated rates anew instead of reusing the saved ones")
    profile_dir: Path = Field(
        default_factory=lambda: cache_directory() / "profiles", description="Where measured rates are saved"
    )
    converted_dir: Path = Field(
        default_factory=lambda: cache_directory() / "mlx", description="MLX: where GGUF models are kept once converted"
    )
    simulated_prefill_rate: float = Field(1000.0, gt=0, description="Simulated engine: prefill tokens per second")
    simulated_decode_ms: str = Field(
        "1:20,4:40", description="Simulated engine: milliseconds of a decode step by batch size"
    )

    simulated_decode_rate: float = Field(
        0.0, ge=0, description="Simulated engine: isolated decode tokens per second to report; 0: the true ones"
    )

    @field_validator("max_active", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if value == "auto" or (str(value).isdecimal() and 1 <= int(str(value)) <= MOST_ACTIVE):
            return value
        raise ValueError(f"give a number from 1 to {MOST_ACTIVE}, or auto")

    @field_validator("cpus")
    @classmethod
    def _readable(cls, value: str) -> str:
        parse_cpus(value)
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> BackendSettings:
        if self.kv_type != "f16" and self.flash_attention == "off":
            raise ValueError(f"--kv-type {self.kv_type} needs flash attention; leave it on, or use f16")
        for engine, names in _OF_ONE_ENGINE.items():
            for name in sorted(names & self.model_fields_set):
                if self.engine != engine and getattr(self, name) != type(self).model_fields[name].default:
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option} is for --engine {engine}; leave it out with --engine {self.engine}")
        if (self.speculate == "draft") != bool(self.draft_model):
            raise ValueError("--speculate draft and --draft-model go together; give both, or neither")
        return self

    @model_validator(mode="after")
    def _batch_fits_a_step(self) -> BackendSettings:
        if 0 < self.step_tokens < self.largest_batch:
            option = "--max-active-limit" if self.max_active == "auto" else "--max-active"
            raise ValueError(
                f"--step-tokens {self.step_tokens} is below {option} {self.largest_batch}: a decode step of the full "
                "batch would not fit; raise the one or lower the other"
            )
        return self

    @model_validator(mode="after")
    def _heeded(self) -> BackendSettings:
        if self.max_active != "auto":
            for name in ("max_active_limit", "inter_token_target_ms"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option} is for --max-active auto; leave it out, or let the batch be chosen")
        return self

    @property
    def largest_batch(self) -> int:
        """What KV pool and engine are built for."""
        return self.max_active_limit if self.max_active == "auto" else self.max_active


def parse_cpus(text: str) -> frozenset[int]:
    """`"0-2,5"` -> {0, 1, 2, 5}; empty for an empty text. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f'"{part}" is not a core or a range of cores; write 0-3 or 0,2')
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
