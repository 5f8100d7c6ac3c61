"""The backend's own rules for its settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_service.engines.mlx_blas import Blas
from backend_service.loading import describe_llama_device, describe_mlx_device
from backend_service.settings import BackendSettings, parse_cpus
from service_kit.faults import StartupFailed


@given(st.sets(st.integers(0, 300)))
def test_any_set_of_cores_can_be_written_as_a_list(cores):
    assert parse_cpus(",".join(map(str, sorted(cores)))) == cores


def test_ranges_of_cores():
    assert parse_cpus("0-3") == {0, 1, 2, 3}
    assert parse_cpus(" 0-1, 5 ,7-7") == {0, 1, 5, 7}
    assert parse_cpus("") == frozenset()
    for wrong in ("a", "-1", "3-1", "1-", "1-2-3"):
        with pytest.raises(ValueError, match="write 0-3 or 0,2"):
            parse_cpus(wrong)


def test_a_step_must_hold_the_batch():
    with pytest.raises(StartupFailed, match="raise the one or lower the other"):
        BackendSettings.load(["--step-tokens", "2", "--max-active", "8"])


@pytest.mark.parametrize("value", ["0", "65", "many", "-1", "1.5", ""])
def test_a_batch_is_a_number_or_auto(value):
    with pytest.raises(StartupFailed, match=r"--max-active is '.*': give a number from 1 to 64, or auto"):
        BackendSettings.load([f"--max-active={value}"])


def test_the_engine_is_built_for_the_largest_batch_that_may_be_chosen():
    assert BackendSettings.load([]).largest_batch == 4
    assert BackendSettings.load(["--max-active", "7"]).largest_batch == 7
    assert BackendSettings.load(["--max-active", "auto"]).largest_batch == 16
    assert BackendSettings.load(["--max-active", "auto", "--max-active-limit", "40"]).largest_batch == 40


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--max-active-limit", "8"], "--max-active-limit is for --max-active auto; leave it out"),
        (["--inter-token-target-ms", "50"], "--inter-token-target-ms is for --max-active auto; leave it out"),
        (["--max-active", "auto", "--inter-token-target-ms", "0"], "greater than 0"),
        (["--max-active", "auto", "--inter-token-target-ms", "nan"], "finite"),
        (["--max-active", "auto", "--step-tokens", "8"], "is below --max-active-limit 16"),
        (["--kv-type", "q8_0", "--flash-attention", "off"], "leave it on, or use f16"),
        (["--speculate", "draft"], "give both, or neither"),
        (["--engine", "simulated", "--speculate", "prompt_lookup"], "leave it out"),
        (["--engine", "mlx", "--kv-type", "q8_0"], "--kv-type is for --engine llama_cpp; leave it out"),
        (["--engine", "mlx", "--n-gpu-layers", "-1"], "--n-gpu-layers is for --engine llama_cpp"),
        (["--weights", "float32"], "--weights is for --engine mlx; leave it out with --engine llama_cpp"),
        (["--draft-model", "small.gguf"], "give both, or neither"),
        (["--speculate", "prompt_lookup", "--guesses", "0"], "greater than or equal to 1"),
    ],
)
def test_settings_that_do_not_go_together(flags, remedy):
    with pytest.raises(StartupFailed, match=remedy):
        BackendSettings.load(flags)


def test_device_in_words():
    assert describe_llama_device(BackendSettings()) == "CPU, 1 thread"
    assert describe_llama_device(BackendSettings(threads=4, cpus="0-3", kv_type="q4_0")) == (
        "CPU, 4 threads, cpus 0-3, q4_0 KV"
    )
    assert describe_llama_device(BackendSettings(n_gpu_layers=-1, threads=2)) == "GPU (all layers) and CPU, 2 threads"


def test_mlx_device_in_words():
    openblas = Blas("OpenBLAS", "libopenblas.so.0", fast=True, remedy="")
    assert describe_mlx_device(BackendSettings(threads=2, cpus="1"), "", openblas) == (
        "CPU, 2 threads, cpus 1, OpenBLAS"
    )
    assert describe_mlx_device(BackendSettings(), "NVIDIA H200", openblas) == "NVIDIA H200"
