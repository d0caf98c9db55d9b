"""Formulas of sums: what they compute, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from mlxrun.jobs.scoring.formula import evaluate_formula, list_names

VALUES = {"a": np.array([1.0, 4.0]), "b": np.array([2.0, 0.0])}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2 * a / (a + b)", [2 / 3, 2.0]),
        ("-a ** 2 - b", [-3.0, -16.0]),
        ("exp(log(a)) + sqrt(a)", [2.0, 6.0]),
        ("maximum(a, minimum(b, 1.5))", [1.5, 4.0]),
        ("3", [3.0, 3.0]),
    ],
)
def test_formulas_of_arrays(text: str, wanted: list[float]) -> None:
    assert evaluate_formula(text, VALUES).tolist() == pytest.approx(wanted)
    assert list_names("b + 2 * exp(a)") == ["a", "b"]


def test_what_is_undefined_is_no_error() -> None:
    with np.errstate(all="ignore"):
        assert np.isinf(evaluate_formula("a / b", VALUES)).tolist() == [False, True]
        assert np.isnan(evaluate_formula("log(0 - a)", VALUES)).all()
        assert np.isinf(evaluate_formula("9.0 ** 9 ** 9 + a", VALUES)).all()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a +",
        "a; b",
        "a.b",
        "__import__('os')",
        "open(a)",
        "a[0]",
        "a if b else 1",
        "lambda: a",
        "exp(a, b)",
    ]
    + ["maximum(a)", "'a'", "True + a", "a < b", "a // b", "exp(x=a)", "1j * a", "(" * 300 + "a" + ")" * 300],
)
def test_what_is_no_formula(text: str) -> None:
    with pytest.raises(ValueError, match="which is no formula"):
        list_names(text)
