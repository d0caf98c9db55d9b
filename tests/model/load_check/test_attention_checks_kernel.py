"""The kernel's check finds attention that is wrong, depends on the batch, or is slow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.hooks.logit_rule import LogitRule
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_gathered, split_pages
from mlxrun.model.load_check import attention_checks, choose, text_ladder
from mlxrun.model.load_check.attention_checks import LENGTHS, KernelCheck, KernelError
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo

QUERIES, KEYS = mx.zeros((2, 4, 1, 32)), mx.zeros((512, 2, 32))
ROWS = PagedRows(mx.array([[1], [0]]), mx.array([3, 0]))


def attend(*args: Any) -> mx.array:
    return attend_gathered(*args)


def attend_without_window(*args: Any) -> mx.array:
    return attend_gathered(*args[:4], replace(args[4], window=None))


def attend_without_cap(*args: Any) -> mx.array:
    return attend_gathered(*args[:4], replace(args[4], cap=0.0))


def attend_without_positions(*args: Any) -> mx.array:
    return attend_gathered(*args[:4], replace(args[4], positions=mx.zeros_like(args[4].positions)))


def attend_by_company(*args: Any) -> mx.array:
    """Rounds otherwise when many rows are computed."""
    return attend_gathered(*args) * (1 + 1e-6 * (args[0].shape[0] == len(LENGTHS)))


def attend_past_the_first_page(*args: Any) -> mx.array:
    rows = args[3]
    return attend_gathered(*args[:3], PagedRows(rows.tables[:, :1], rows.lengths), *args[4:])


def test_the_librarys_own_attention_passes_and_each_shape_is_compared_once() -> None:
    calls: list[int] = []

    def count(*args: Any) -> mx.array:
        calls.append(args[0].shape[0])
        return attend(*args)

    check = KernelCheck(count, timed=False)
    for _ in range(3):
        check(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2, 300))
    assert calls == [len(LENGTHS), 1, 2, 2, 2]


def attend_keys_as_values(*args: Any) -> mx.array:
    keys, _ = split_pages(*args[1:3])
    return attend_gathered(args[0], keys, keys if args[2] is None else args[2], *args[3:])


def test_keys_and_values_of_one_array_are_compared_by_themselves() -> None:
    """They are another kernel."""
    joined = mx.concatenate([KEYS, KEYS])
    KernelCheck(attend, timed=False)(QUERIES, joined, None, ROWS, LogitRule(0.2))
    check = KernelCheck(attend_keys_as_values, timed=False)
    check(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2))
    with pytest.raises(KernelError, match="differs by"):
        check(QUERIES, joined, None, ROWS, LogitRule(0.2))


@pytest.mark.parametrize("wrong", [attend_without_window, attend_by_company, attend_past_the_first_page])
def test_a_wrong_kernel_is_found(wrong: Any) -> None:
    with pytest.raises(KernelError, match=r"differs by|depends on"):
        KernelCheck(wrong, timed=False)(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2, 300))


LATENT = (QUERIES, mx.zeros((512, 1, 32)), mx.zeros((512, 1, 8)), ROWS)
TURNED = LogitRule(0.2, positions=mx.zeros((2, 4, 1, 8)))


@pytest.mark.parametrize("timed", [False, True])
def test_the_latent_form_and_soft_caps_pass(timed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "SLOWER", 1e9)
    KernelCheck(attend, timed=timed)(*LATENT, TURNED)
    KernelCheck(attend, timed=timed)(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2, cap=0.5))


def test_a_kernel_that_ignores_soft_caps_or_positions_is_found() -> None:
    check = KernelCheck(attend_without_cap, timed=False)
    check(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2))
    with pytest.raises(KernelError, match="differs by"):
        check(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2, cap=0.5))
    with pytest.raises(KernelError, match="differs by"):
        KernelCheck(attend_without_positions, timed=False)(*LATENT, TURNED)


def test_a_slow_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # each measurement of the library takes one tick, each of the kernel a thousand
    slow = {"ticks": 0.0}

    def read_clock() -> float:
        return next(clock) + slow["ticks"]

    def attend_slowly(*args: Any) -> mx.array:
        slow["ticks"] += 1000
        return attend(*args)

    monkeypatch.setattr(time, "perf_counter", read_clock)
    with pytest.raises(KernelError, match="takes"):
        KernelCheck(attend_slowly)(QUERIES, KEYS, KEYS, ROWS, LogitRule(0.2))


def fail_to_compile(*args: Any) -> mx.array:
    raise RuntimeError("[metal_kernel] the source does not compile")


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("kernel", [attend, fail_to_compile, attend_by_company, attend_past_the_first_page])
def test_a_model_decodes_without_a_kernel_that_fails(
    zoo: Zoo, kernel: Any, reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU that nobody has seen: loading goes on, with attention by groups of rows."""
    monkeypatch.setattr(choose, "uses_gpu", lambda: True)
    monkeypatch.setattr(text_ladder, "uses_gpu", lambda: True)
    monkeypatch.setattr(text_ladder, "KernelCheck", lambda timed: KernelCheck(kernel, timed=False))
    report = probe_model(zoo.text("llama"), reproducible=reproducible)
    works = kernel is attend
    assert list_failed(report) == ([] if works else ["decode paged"])
    assert report.methods.decode == ("compiled" if works else "ragged")
    failed = [check for check in report.checks if not check.passed]
    assert all(check.instead == "attention by groups of rows of similar length" for check in failed)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_timing_decides_nothing_in_reproducible_mode(
    zoo: Zoo, reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts of one job could choose two kernels, whose last digits differ."""
    for module in (choose, text_ladder):
        monkeypatch.setattr(module, "uses_gpu", lambda: True)
    monkeypatch.setattr(text_ladder, "get_backend", lambda: "metal")
    monkeypatch.setattr(text_ladder, "KernelCheck", lambda timed: KernelCheck(attend, timed=timed))
    found = set()
    for slower in (1e9, 0.0):
        monkeypatch.setattr(attention_checks, "SLOWER", slower)
        found.add(probe_model(zoo.text("llama"), reproducible=reproducible).methods.decode)
    assert found == ({"compiled"} if reproducible else {"compiled", "ragged"})
