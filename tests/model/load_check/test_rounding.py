"""What counts as rounding follows from the library's logits alone."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.load_check.rounding import (
    LEAST_WORST,
    MOST_WORST,
    CheckLogits,
    LowPrecisionRounding,
    compare_logits,
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
    assert not compared.passed and compared.limit == MOST_WORST[mx.bfloat16]


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
