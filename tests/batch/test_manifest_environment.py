"""Which facts of two environments are compared, and how their differences are named."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.batch.manifest_environment import RunEnvironment, list_versions

VERSIONS = {"python": "3.11.1", "mlx": "0.30.1", "numpy": "2.1.0"}
DEVICE = {
    "backend": "cpu",
    "name": "CPU",
    "blas": "libopenblas.so.0",
    "blas_kernel": "Zen",
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
        ({}, {"blas_kernel": "Haswell"}, ["the BLAS kernel is Haswell, was Zen"]),
        ({}, {"blas": None}, ["the BLAS library is not known, was libopenblas.so.0"]),
        ({"more": "1"}, {"blas_threads": 4}, ["the number of BLAS threads is 4, was 2"]),
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
