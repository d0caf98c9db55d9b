"""What counts as rounding follows from the library's logits alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.load_check.rounding import (
    LEAST_WORST,
    OWN_FACTOR,
    CheckLogits,
    LowPrecisionRounding,
    compare_logits,
    compare_rows,
    measure_rows,
)

VOCAB = 500


def make_rows(seed: int, noise: float = 0.0, count: int = 9) -> CheckLogits:
    """Rows of logits of standard deviation 1, the same ones for each call, with noise of this seed."""
    base = np.random.default_rng(0).normal(size=(count, VOCAB))
    rows = base + noise * np.random.default_rng(seed).normal(size=base.shape)
    return {(0, step): mx.array(row.astype(np.float32)) for step, row in enumerate(rows)}


def compare(found: CheckLogits, noise: float = 0.02, dtype: mx.Dtype = mx.bfloat16) -> bool:
    return LowPrecisionRounding(dtype, make_rows(1, noise), make_rows(0)).compare(found).passed


def test_a_method_may_round_as_the_library_does_elsewhere() -> None:
    assert compare(make_rows(2, 0.02)) and compare(make_rows(0))
    assert not compare(make_rows(2, 0.04))


def test_what_is_compared_does_not_move_the_limit() -> None:
    """However wrong a method is, the limit is that of the library's rounding."""
    rounding = LowPrecisionRounding(mx.bfloat16, make_rows(1, 0.02), make_rows(0))
    limits = {rounding.compare(make_rows(3, noise)).limit for noise in (0.05, 0.1, 0.5)}
    assert len(limits) == 1 and limits.pop() == pytest.approx(0.03, rel=0.1)


def test_one_row_that_is_wrong_is_found() -> None:
    """The median does not see it; the worst row does."""
    found = make_rows(2, 0.02)
    found[0, 4] = found[0, 4] + 0.3 * mx.array(np.random.default_rng(5).normal(size=VOCAB).astype(np.float32))
    assert not compare(found)


def test_one_row_that_rounding_moved_passes() -> None:
    found = make_rows(2, 0.02)
    found[0, 4] = make_rows(7, 0.05)[0, 4]
    assert LEAST_WORST[mx.bfloat16] > 0.05 and compare(found)


def test_a_library_that_rounds_by_much_hides_no_row_that_is_far_off() -> None:
    rounding = LowPrecisionRounding(mx.bfloat16, make_rows(1, 0.2), make_rows(0))
    found = make_rows(2, 0.2)
    found[0, 1] = make_rows(4, 0.6)[0, 1]
    compared = rounding.compare(found)
    assert not compared.passed and compared.limit == pytest.approx(OWN_FACTOR * 0.2, rel=0.2)


def test_nan_never_passes() -> None:
    found = make_rows(0)
    found[0, 2] = found[0, 2] * mx.nan
    assert not compare(found)


def test_rows_that_are_added_count() -> None:
    rounding = LowPrecisionRounding(mx.bfloat16, make_rows(1, 0.02), make_rows(0))
    more, exact = {(1, 0): make_rows(1, 0.02)[0, 0]}, {(1, 0): make_rows(0)[0, 0]}
    rounding.add(more, exact)
    assert rounding.compare(more).passed


def test_differences_are_in_standard_deviations() -> None:
    exact = make_rows(0)
    shifted = {key: row + 0.5 for key, row in exact.items()}
    assert list(measure_rows(shifted, exact).values()) == pytest.approx([0.5] * 9, rel=0.1)
    assert compare_logits(shifted, exact) == pytest.approx(0.5, rel=0.1)


# What rows of logits differ from float32, in standard deviations: 12 layers of the shape of Qwen3-30B-A3B in
# 4 bit with random weights, on an H200, for five sets of prompts.
EXPERT_ROWS = {
    (7, "library"): "0.039 0.137 0.051 0.032 0.129 0.053 0.128 0.031 0.096",
    (7, "grouped"): "0.039 0.135 0.054 0.128 0.129 0.126 0.103 0.144 0.124",
    (7, "ragged"): "0.039 0.135 0.054 0.130 0.135 0.031 0.103 0.144 0.096",
    (7, "paged"): "0.039 0.125 0.032 0.130 0.050 0.129 0.143 0.059 0.109",
    (1, "library"): "0.032 0.085 0.168 0.039 0.025 0.067 0.095 0.109 0.081",
    (1, "grouped"): "0.032 0.089 0.118 0.095 0.072 0.111 0.123 0.071 0.099",
    (1, "ragged"): "0.032 0.089 0.118 0.097 0.074 0.114 0.123 0.081 0.184",
    (1, "paged"): "0.032 0.084 0.039 0.097 0.168 0.046 0.113 0.065 0.147",
    (2, "library"): "0.094 0.159 0.127 0.018 0.033 0.080 0.188 0.103 0.041",
    (2, "grouped"): "0.094 0.157 0.019 0.188 0.033 0.101 0.149 0.071 0.110",
    (2, "ragged"): "0.094 0.157 0.019 0.187 0.019 0.107 0.149 0.080 0.112",
    (2, "paged"): "0.094 0.158 0.025 0.187 0.128 0.049 0.110 0.079 0.094",
    (3, "library"): "0.081 0.111 0.121 0.106 0.063 0.143 0.089 0.083 0.073",
    (3, "grouped"): "0.081 0.055 0.106 0.089 0.125 0.081 0.096 0.052 0.069",
    (3, "ragged"): "0.081 0.055 0.106 0.079 0.118 0.082 0.096 0.051 0.074",
    (3, "paged"): "0.061 0.108 0.111 0.090 0.122 0.062 0.027 0.129 0.228",
    (4, "library"): "0.104 0.044 0.082 0.060 0.021 0.049 0.115 0.066 0.178",
    (4, "grouped"): "0.104 0.044 0.063 0.115 0.021 0.085 0.142 0.043 0.178",
    (4, "ragged"): "0.104 0.044 0.063 0.116 0.022 0.090 0.142 0.066 0.155",
    (4, "paged"): "0.104 0.044 0.057 0.116 0.078 0.019 0.072 0.049 0.178",
}


def read_expert_rows(seed: int, method: str) -> list[float]:
    return list(map(float, EXPERT_ROWS[seed, method].split()))


@pytest.mark.parametrize(("seed", "method"), [key for key in EXPERT_ROWS if key[1] != "library"])
def test_rows_that_rounding_sent_to_other_experts_pass(seed: int, method: str) -> None:
    """The median of a method was up to 2.4 times the library's by chance alone."""
    own, found = read_expert_rows(seed, "library"), read_expert_rows(seed, method)
    assert compare_rows(found, own, max(own), mx.bfloat16).passed
    assert not compare_rows([4 * each for each in found], own, max(own), mx.bfloat16).passed


def test_what_the_library_rounds_to_always_passes() -> None:
    """However many layers there are: a limit below the library's own rounding would refuse the model."""
    own = [0.3, 0.5, 0.4]
    assert compare_rows(own, own, max(own), mx.bfloat16).passed
    assert not compare_rows([1.4, 1.4, 1.4], own, max(own), mx.bfloat16).passed
