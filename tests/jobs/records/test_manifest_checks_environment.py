"""Which facts of two environments are compared, and how their differences are named."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.jobs.records.manifest_checks import RunEnvironment, list_versions

VERSIONS = {"python": "3.11.1", "mlx": "0.30.1", "numpy": "2.1.0", "nvidia-cublas": "13.0"}
DEVICE = {
    "backend": "cpu",
    "name": "CPU",
    "blas": "libopenblas.so.0",
    "blas_version": "0.3.21",
    "blas_kernel": "Zen",
    "compile": True,
    "tf32": False,
    "blas_threads": 2,
}


def test_versions_are_those_of_what_computes_answers() -> None:
    assert {"python", "mlx", "mlx-lm", "transformers", "tokenizers", "numpy"} <= list_versions().keys()


@pytest.mark.parametrize(
    "versions, device, differences",
    [
        ({}, {}, []),
        ({"python": "3.12.0"}, {"free_memory": 3}, []),
        ({"mlx": "0.31.0"}, {}, ["mlx is 0.31.0, was 0.30.1"]),
        ({"numpy": "2.2.0"}, {}, ["numpy is 2.2.0, was 2.1.0"]),
        ({}, {"backend": "cuda"}, ["the backend is cuda, was cpu"]),
        ({}, {"blas_kernel": "Haswell"}, ["the BLAS kernel (OPENBLAS_CORETYPE) is Haswell, was Zen"]),
        ({}, {"blas_version": "0.3.30"}, ["the version of BLAS is 0.3.30, was 0.3.21"]),
        ({}, {"compile": False}, ["compiling (MLX_DISABLE_COMPILE, or g++ on a CPU) is off, was on"]),
        ({}, {"tf32": True}, ["TF32 (MLX_ENABLE_TF32) is on, was off"]),
        ({"nvidia-cublas": "13.1"}, {}, ["nvidia-cublas is 13.1, was 13.0"]),
        ({}, {"blas": None}, ["the BLAS library is not known, was libopenblas.so.0"]),
        (
            {"more": "1"},
            {"blas_threads": 4},
            ["the number of BLAS threads (engine.blas_threads) is 4, was 2"],
        ),
    ],
)
def test_what_differs_is_named_with_old_and_new(
    versions: dict[str, str], device: dict[str, Any], differences: list[str]
) -> None:
    old, new = RunEnvironment(VERSIONS, DEVICE), RunEnvironment(VERSIONS | versions, DEVICE | device)
    assert old.list_differences(new) == differences


def test_what_is_not_known_is_not_compared() -> None:
    known, unknown = RunEnvironment(VERSIONS, DEVICE), RunEnvironment(None, None)
    assert known.list_differences(unknown) == unknown.list_differences(known) == []
    assert RunEnvironment.parse({"versions": 3, "device": "x"}) == unknown
    assert RunEnvironment.parse({"versions": VERSIONS, "device": DEVICE}) == known


@pytest.mark.parametrize(
    ("was", "now", "hinders"),
    [(None, None, True), (None, True, True), (True, True, True), (None, False, False), (False, False, False)],
)
def test_threads_that_nothing_has_fixed_hinder_no_run(
    was: bool | None, now: bool | None, hinders: bool
) -> None:
    """Runs of earlier versions do not say whether they were. Where bytes are compared, they are named."""
    old, new = (
        RunEnvironment(
            {}, {"blas_threads": count, **({} if fixed is None else {"blas_threads_fixed": fixed})}
        )
        for count, fixed in ((2, was), (1, now))
    )
    text = "the number of BLAS threads (engine.blas_threads) is 1, was 2"
    assert old.list_differences(new) == [text]
    assert old.list_obstacles(new) == ([text] if hinders else [])


def test_variables_of_mlx_are_named_and_hinder_no_run() -> None:
    """Those whose effect is a fact of the device are named once, by that fact."""
    old = RunEnvironment({}, {"variables": {"MLX_BFS_MAX_WIDTH": "20"}})
    new = RunEnvironment({}, {"variables": {"MLX_DISABLE_COMPILE": "1", "MLX_MAX_OPS_PER_BUFFER": "8"}})
    assert old.list_differences(new) == [
        "the variable MLX_BFS_MAX_WIDTH is not set, was '20'",
        "the variable MLX_MAX_OPS_PER_BUFFER is '8', was not set",
    ]
    assert old.list_obstacles(new) == []
    assert RunEnvironment({}, {}).list_differences(new) == []  # the run of a version that did not record them
