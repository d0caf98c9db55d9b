"""The kernel in a report, with its slow twin for machines without a GPU; a mistake in it is a great error."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from mlxrun.model.hooks.logit_rule import LogitRule
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_gathered, can_attend
from mlxrun.model.load_check import kernel_report
from mlxrun.model.load_check.kernel_report import SHAPES, measure_kernel, measure_shape


def test_there_is_no_kernel_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_report, "get_backend", lambda: "cpu")
    assert measure_kernel() == []


def test_the_kernel_covers_all_shapes() -> None:
    assert all(can_attend(each.heads, each.kv_heads, each.width, each.width) for each in SHAPES)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, each call once: half precision is slow on a CPU."""

    def call_once(compute: Callable[[], mx.array]) -> float:
        mx.eval(compute())
        return 1e-6

    monkeypatch.setattr(kernel_report, "TIMED_ROWS", 1)
    monkeypatch.setattr(kernel_report, "measure_seconds", call_once)


def test_what_is_measured(brief: None) -> None:
    found = measure_shape(SHAPES[2], "float16", attend_gathered)
    assert found["kernel_error"] < 1e-2 and found["library_error"] < 1e-2
    assert (found["kernel_us"], found["library_us"], found["family"]) == (1.0, 1.0, "gemma3 4B")


def test_a_wrong_kernel_has_a_great_error(brief: None) -> None:
    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, rows: PagedRows, rule: LogitRule
    ) -> mx.array:
        return 1.05 * attend_gathered(queries, keys, values, rows, rule)

    found = measure_shape(SHAPES[2], "float16", attend)
    assert found["kernel_error"] == pytest.approx(0.05, rel=0.1) and found["library_error"] < 1e-2


def test_a_kernel_that_does_not_compile_is_recorded() -> None:
    def attend(*_: object) -> mx.array:
        raise RuntimeError("[metal::Device] Unable to build metal library")

    found = measure_shape(SHAPES[2], "bfloat16", attend)
    assert found["error"] == "RuntimeError: [metal::Device] Unable to build metal library"
    assert "kernel_us" not in found
