"""What is decided for eight machines and six models, as tables that a reader can check by eye."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.model.machine.decisions import (
    Decision,
    Machine,
    decide_kernel,
    decide_memory_limit,
    decide_pool,
    decide_weights,
    decide_wired,
)
from tools import machine_tables

GB = 10**9
# Memory counts only as far as it is free. The H200's is its own, and a CPU has no GPU's recommendation.
LIMITS = """
| machine | memory limit | why | pool | wired |
| Mac, 8 GB | 2.8 GB | 80% of the 3.5 GB that are free; Metal recommends 5.7 GB | 350.0 MB | 2.8 GB |
| Mac, 16 GB, busy | 5.6 GB | 80% of the 7.0 GB that are free; Metal recommends 11.5 GB | 700.0 MB | 5.6 GB |
| Mac, 36 GB | 20.8 GB | 80% of the 26.0 GB that are free; Metal recommends 25.8 GB | 2.6 GB | 20.8 GB |
| Mac, 64 GB | 41.6 GB | 80% of the 52.0 GB that are free; Metal recommends 51.5 GB | 5.2 GB | 41.6 GB |
| Mac, 128 GB | 89.6 GB | 80% of the 112.0 GB that are free; Metal recommends 103.1 GB | 11.2 GB | 89.6 GB |
| H200 | 141.0 GB | the GPU's own memory | - | - |
| CPU, 16 GB | 8.8 GB | 80% of the 11.0 GB that are free | - | - |
| CPU, 128 GB | 96.0 GB | 80% of the 120.0 GB that are free | - | - |
"""
# Quantized weights stay quantized on every Mac. The H200 and the large CPU time both forms where both fit.
FORMS = """
| machine | 0.6B bf16 | 4B 4 bit | 8B 4 bit | 8B bf16 | 30B-A3B 4 bit | 70B 4 bit | kernel |
| Mac, 8 GB | plain | quantized | too large | too large | too large | too large | timed |
| Mac, 16 GB, busy | plain | quantized | quantized | too large | too large | too large | timed |
| Mac, 36 GB | plain | quantized | quantized | plain | quantized | too large | timed |
| Mac, 64 GB | plain | quantized | quantized | plain | quantized | too large | timed |
| Mac, 128 GB | plain | quantized | quantized | plain | quantized | quantized | timed |
| H200 | plain | timed | timed | plain | timed | quantized | timed |
| CPU, 16 GB | plain | timed methods | timed methods | too large | too large | too large | none |
| CPU, 128 GB | plain | timed | timed | plain | timed methods | timed methods | none |
"""
# Nothing is timed. A form that rounds otherwise is never chosen for lack of memory: it is refused.
REPRODUCIBLE = """
| machine | 0.6B bf16 | 4B 4 bit | 8B 4 bit | 8B bf16 | 30B-A3B 4 bit | 70B 4 bit | kernel |
| Mac, 8 GB | plain | quantized | too large | too large | too large | too large | checked |
| Mac, 16 GB, busy | plain | quantized | quantized | too large | too large | too large | checked |
| Mac, 36 GB | plain | quantized | quantized | plain | quantized | too large | checked |
| Mac, 64 GB | plain | quantized | quantized | plain | quantized | too large | checked |
| Mac, 128 GB | plain | quantized | quantized | plain | quantized | quantized | checked |
| H200 | plain | held | held | plain | held | refused | checked |
| CPU, 16 GB | plain | refused | refused | too large | too large | too large | none |
| CPU, 128 GB | plain | held | held | plain | refused | refused | none |
"""


def test_memory_is_limited_by_what_is_free() -> None:
    assert strip(machine_tables.render_limits()) == LIMITS.strip()


@pytest.mark.parametrize(("reproducible", "expected"), [(False, FORMS), (True, REPRODUCIBLE)])
def test_weights_and_the_kernel(reproducible: bool, expected: str) -> None:
    assert strip(machine_tables.render_forms(reproducible)) == expected.strip()


def strip(lines: list[str]) -> str:
    return "\n".join(line for line in lines if not line.startswith("| ---"))


def test_the_page_is_fresh() -> None:
    found = machine_tables.PAGE.read_text(encoding="utf-8")
    assert found == machine_tables.render_page(), "run make generate"


MAC = Machine("metal", 11 * GB, 11 * GB, 12 * GB)
H200 = Machine("cuda", 141 * GB, 141 * GB)
CPU = Machine("cpu", 16 * GB, free=10 * GB)


def test_the_configured_limit_goes_first() -> None:
    for machine in (MAC, H200, CPU):
        assert decide_memory_limit(machine, 5).value == 5


def test_free_memory_that_is_unknown_limits_nothing() -> None:
    assert decide_memory_limit(Machine("metal", 11 * GB, 11 * GB)).value == 11 * GB
    assert decide_memory_limit(Machine("cpu", 16 * GB)) == Decision(0, "the free memory is unknown")
    assert decide_pool(Machine("metal", 0), 0) == Decision(None, "the memory limit is unknown")


def test_what_metal_wires_is_never_more_than_it_recommends() -> None:
    assert [decide_wired(MAC, limit).value for limit in (5 * GB, 20 * GB, 0)] == [5 * GB, 11 * GB, 11 * GB]
    assert decide_wired(H200, 5).value is decide_wired(CPU, 5).value is None


@pytest.mark.parametrize("machine", [MAC, H200, CPU])
@pytest.mark.parametrize("reproducible", [False, True])
def test_settings_go_before_everything(machine: Machine, reproducible: bool) -> None:
    def decide(choice: Any) -> str:
        return decide_weights(machine.backend, GB, 100 * GB, choice, reproducible).value

    assert decide("always") == "held"
    timed = machine is CPU and not reproducible
    assert decide("never") == ("timed_methods" if timed else "quantized")


@pytest.mark.parametrize("machine", [MAC, H200, CPU])
@pytest.mark.parametrize("needed", [0, GB, 100 * GB])
@pytest.mark.parametrize("limit", [0, GB, 10**12])
def test_reproducible_decisions_time_nothing(machine: Machine, needed: int, limit: int) -> None:
    """And give a form of one rounding whatever the memory, or none."""
    found = decide_weights(machine.backend, needed, limit, reproducible=True).value
    usual = "quantized" if machine is MAC or not needed else "held"
    assert found == usual or (found == "refused" and needed > limit / 2 > 0)
    assert decide_kernel(machine.backend, reproducible=True).value in ("none", "checked")


def test_a_kernel_that_is_not_compared_is_not_used() -> None:
    assert decide_kernel("metal", load_check=False).value == "none"
    assert [decide_kernel(name).value for name in ("metal", "cuda", "cpu")] == ["timed", "timed", "none"]
