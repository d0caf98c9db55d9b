"""Which form quantized weights get, and what is timed to choose it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from mlxrun.core.errors import ConfigError
from mlxrun.model.hooks import product_timing, weight_form
from mlxrun.model.hooks.product_timing import HELD, PACKED_WIDTHS, WIDTHS, bound_by_more_rows
from mlxrun.model.hooks.quantized_layers import MethodTable, ProductMethod
from mlxrun.model.hooks.weight_form import (
    EXPERT_TABLES,
    FIXED_TABLES,
    WeightForm,
    choose_table,
    is_held_faster,
    settle_weights,
)
from tests.helpers import engine_driver

pytestmark = pytest.mark.thorough

Curve = Mapping[str, Mapping[int, float]]
# Microseconds by method and rows: 4096 x 6144 and 1024 x 3072 in 4 bit on an H200, 4096 x 4096 on a CPU.
LARGE_ON_CUDA: Curve = {
    "library": {1: 23, 2: 37, 4: 64, 8: 99},
    "flat": {1: 24, 2: 35, 4: 43, 8: 21, 32: 31, 64: 39, 256: 116},
    "dequantized": {1: 82, 2: 97, 4: 97, 8: 88, 32: 82, 64: 95, 256: 105},
    HELD: {1: 21, 2: 38, 4: 38, 8: 29, 32: 26, 64: 36, 256: 49},
}
SMALL_ON_CUDA: Curve = {
    "library": {1: 7.7, 2: 11, 4: 15, 8: 19},
    "flat": {1: 7.9, 2: 22, 4: 23, 8: 8.8, 32: 10.6, 64: 12, 256: 20},
    "dequantized": {1: 23, 4: 44, 8: 36, 32: 45, 64: 46, 256: 38},
    HELD: {1: 8.1, 2: 21, 4: 23, 8: 20, 32: 23, 64: 24, 256: 28},
}
ON_A_CPU: Curve = {
    "library": {1: 13500, 2: 26430, 4: 54700},
    "dequantized": {1: 19000, 2: 20000, 4: 22000, 8: 23000, 32: 25000, 64: 40000, 256: 160000},
    HELD: {1: 4300, 2: 4800, 4: 7100, 8: 7400, 32: 8400, 64: 25000, 256: 140500},
}
BOUND_BY_MEMORY: Curve = {  # as a device where a token costs the bytes of its weights
    "library": {1: 10, 2: 11, 4: 13, 8: 18, 32: 40, 64: 75, 256: 300},
    HELD: {1: 36, 2: 36, 4: 36, 8: 36, 32: 45, 64: 76, 256: 280},
}


@pytest.mark.parametrize(
    ("curve", "entries"),
    [
        (LARGE_ON_CUDA, ((2, "library"), (64, "flat"), (256, "dequantized"))),
        (SMALL_ON_CUDA, ((4, "library"), (256, "flat"))),
        (ON_A_CPU, ((1, "library"), (256, "dequantized"))),
        (BOUND_BY_MEMORY, ((256, "library"),)),
    ],
)
def test_the_best_method_is_chosen_for_each_number_of_rows(curve: Curve, entries: Any) -> None:
    """The default stays where another one gains little: here, the library's call."""
    assert choose_table(curve, MethodTable()).entries == entries


def test_what_was_not_timed_follows_the_default() -> None:
    default = MethodTable(((1, "library"), (128, "flat"), (256, "dequantized")))
    assert choose_table({}, default) == default
    assert choose_table({"library": {1: 5.0}, "flat": {1: 2.0}}, default).entries[0] == (128, "flat")


def test_more_rows_on_cuda_give_more_tokens_in_all() -> None:
    """Milliseconds a step of 8B in 4 bit on an H200; the libraries' call takes as long for each row. The twin
    multiplies all but single rows as one matrix."""

    def count_tokens(table: MethodTable, rows: int) -> float:
        flat = 16.0 if rows < 16 else 24.6
        return rows / (flat if table.choose(rows) == "flat" else 2.3 + 4.0 * rows)

    table = choose_table({}, FIXED_TABLES["cuda"])
    rates = [count_tokens(table, rows) for rows in range(1, 16)]
    assert rates == sorted(rates)
    twin = MethodTable(((1, "library"), (128, "flat")))
    assert count_tokens(twin, 2) < count_tokens(twin, 1)


@pytest.mark.parametrize(
    ("curve", "held"),
    [
        (LARGE_ON_CUDA, True),
        (SMALL_ON_CUDA, False),
        (ON_A_CPU, True),
        (BOUND_BY_MEMORY, False),
        ({}, False),
    ],
)
def test_weights_are_held_dequantized_where_that_is_faster_on_the_whole(curve: Curve, held: bool) -> None:
    assert is_held_faster(curve) is held


def test_held_weights_that_were_hopeless_with_many_rows_are_not_chosen() -> None:
    curve = {"library": {1: 10.0, 2: 10.0}, HELD: {1: 1.0}}
    assert not is_held_faster(curve)


def make_model() -> nn.Module:
    mx.random.seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 512), nn.Linear(512, 64))
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def time_products() -> Mapping[str, Mapping[int, float]]:
    products = weight_form.pick_products(make_model())
    return product_timing.time_products(
        products, weight_form.get_default_table(products, mx.float32), mx.float32
    )


def pretend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weight_form, product_timing):
        monkeypatch.setattr(module, "get_backend", lambda: backend)


def test_products_are_timed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = time_products()
    assert set(seconds) == {"library", "dequantized", HELD}, "rows as a matrix gain nothing on a CPU"
    assert all(value > 0 for times in seconds.values() for value in times.values())
    monkeypatch.setattr(product_timing, "SECONDS", -1)
    assert {rows for times in time_products().values() for rows in times} == {1}


def test_other_processes_do_not_make_few_rows_look_slow() -> None:
    """On a CPU a product of many rows bounds that of fewer; and a slow timing is taken again."""
    noisy = {1: 120.0, 2: 0.9, 8: 1.2, 32: 34.0, 64: 4.0}
    assert bound_by_more_rows(noisy) == {1: 0.9, 2: 0.9, 8: 1.2, 32: 4.0, 64: 4.0}
    calls: list[int] = []

    def compute() -> list[mx.array]:
        calls.append(0)
        time.sleep(0.05 if len(calls) < 4 else 0.0)  # the first ones, as beside other processes
        return []

    assert product_timing.time_graph(compute)[0] < 0.04


def test_what_may_not_be_held_is_not_dequantized_to_time_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the config forbids it, nor where the memory does not suffice."""
    monkeypatch.setattr(product_timing, "dequantize_weight", lambda *given: pytest.fail("dequantized"))
    seconds = settle_weights(make_model(), make_config(dequantize="never"), mx.float32).seconds
    assert set(seconds) == {"library", "dequantized"}
    config = engine_driver.make_config(Path("model"), memory_limit=1000)
    assert set(settle_weights(make_model(), config, mx.float32).seconds) == {"library", "dequantized"}


def test_hopeless_methods_are_not_timed_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(graph: Any) -> tuple[float, float]:
        inputs, name = graph.args[-1], graph.keywords["name"]
        costs = {"library": 1.0, "flat": 9.0, "dequantized": 2.0}
        return (3.0 if name == HELD else costs[name] * inputs[0].shape[0]), 0.0

    pretend("metal", monkeypatch)
    monkeypatch.setattr(product_timing, "time_graph", compute)
    seconds = time_products()
    assert set(seconds[HELD]) == set(WIDTHS)
    assert set(seconds["library"]) == {1, 2, 4, 8, 32} and set(seconds["flat"]) == {1, 4, 8, 32}


def test_on_cuda_only_kernels_that_are_used_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    time_by(BOUND_BY_MEMORY, monkeypatch)
    seconds = time_products()
    assert {name: set(times) for name, times in seconds.items()} == {
        HELD: set(WIDTHS),
        "library": {1, 2},
        "flat": {4, 8, 32, 64},
        "dequantized": {256},
    }
    assert choose_table(seconds, FIXED_TABLES["cuda"]) == FIXED_TABLES["cuda"]


def time_by(curve: Curve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products take these times on CUDA; 1 where the curve has none."""

    def time_graph(graph: Any) -> tuple[float, float]:
        inputs, name = graph.args[-1], graph.keywords["name"]
        return curve.get(name, {}).get(inputs[0].shape[0], 1), 0.0

    pretend("cuda", monkeypatch)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setattr(product_timing, "time_graph", time_graph)


@pytest.mark.parametrize("curve", [LARGE_ON_CUDA, SMALL_ON_CUDA, {"library": {1: 7.9}, HELD: {1: 10.4}}])
def test_on_cuda_weights_are_held_unless_one_row_gains_clearly(
    curve: Curve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More rows gain less; a tie of launches means held, and nothing else is timed or compiled."""
    time_by(curve, monkeypatch)
    with caplog.at_level("INFO"):
        form = settle_weights(make_model(), make_config(), mx.float32)
    assert form.held and form.seconds == {HELD: {1: curve[HELD][1]}, "library": {1: curve["library"][1]}}
    assert "compiles" not in caplog.text


def test_on_cuda_more_rows_decide_where_one_row_gains(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for name, more in {"fast": 10.0, "slow": 400.0}.items():
        times, held = (dict.fromkeys(WIDTHS[1:], value) for value in (more, 40.0))
        curve = {method: {1: 10.0} | times for method in get_args(ProductMethod)} | {HELD: {1: 36.0} | held}
        time_by(curve, monkeypatch)
        with caplog.at_level("INFO"):
            found[name] = settle_weights(make_model(), make_config(), mx.float32)
        assert set(found[name].seconds[HELD]) == set(WIDTHS) and "MLX compiles for a minute" in caplog.text
    assert not found["fast"].held and found["fast"].table == FIXED_TABLES["cuda"]
    assert found["slow"].held


@pytest.mark.parametrize(("packed", "held"), [(20.0, False), (38.0, False), (60.0, True)])
def test_on_cuda_the_kernel_of_packed_weights_is_used_unless_it_decodes_slower(
    packed: float, held: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draw means less memory; and nothing is timed that is compiled for a minute."""
    monkeypatch.setattr(weight_form, "can_multiply_packed", lambda layer, dtype: True)
    time_by({"packed": dict.fromkeys(WIDTHS, packed), HELD: dict.fromkeys(WIDTHS, 37.0)}, monkeypatch)
    with caplog.at_level("INFO"):
        form = settle_weights(make_model(), make_config(), mx.float32)
    assert form.held is held and form.table == weight_form.PACKED_TABLE
    assert {name: set(times) for name, times in form.seconds.items()} == {
        HELD: set(PACKED_WIDTHS),
        "packed": set(PACKED_WIDTHS),
    }
    assert "compiles" not in caplog.text
    again = settle_weights(make_model(), make_config(), mx.float32, form.seconds)
    assert (again.held, again.table) == (held, form.table)


@pytest.mark.parametrize("options", [{"dequantize": "never"}, {"memory_limit": 1000}])
def test_on_cuda_nothing_is_timed_where_weights_may_not_be_held(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is the fixed one then, whatever the times are."""
    pretend("cuda", monkeypatch)
    monkeypatch.setattr(product_timing, "time_graph", lambda graph: pytest.fail("timed"))
    config = engine_driver.make_config(Path("model"), **{"memory_limit": 10**9} | options)
    form = settle_weights(make_model(), config, mx.float32)
    assert (form.held, form.table, form.seconds) == (False, FIXED_TABLES["cuda"], {})


def test_the_memory_of_dequantized_weights_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = (256 * 256 + 256 * 512 + 512 * 64) * 4
    monkeypatch.setattr(weight_form, "time_products", lambda *given: {"held": {1: given[-1]}})
    for limit, may_hold in ((needed * 2, True), (needed * 2 - 2, False)):
        config = engine_driver.make_config(Path("model"), memory_limit=limit)
        assert settle_weights(make_model(), config, mx.float32).seconds == {"held": {1: may_hold}}


def test_on_metal_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("metal", monkeypatch)
    monkeypatch.setattr(weight_form, "time_products", lambda *given: pytest.fail("timed"))
    for choice, held in (("auto", False), ("never", False), ("always", True)):
        form = settle_weights(make_model(), make_config(dequantize=choice), mx.float32)
        assert (form.held, form.table) == (held, FIXED_TABLES["metal"])


def make_config(**options: Any) -> Any:
    return engine_driver.make_config(Path("model"), memory_limit=10**9, **options)


@pytest.mark.parametrize("reproducible", [False, True])
def test_settings_decide(reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_form, "time_products", lambda *given: ON_A_CPU)
    found = {
        choice: settle_weights(
            make_model(), make_config(dequantize=choice, reproducible=reproducible), mx.float32
        )
        for choice in ("auto", "never", "always")
    }
    assert [form.held for form in found.values()] == [True, False, True]
    assert found["never"].table == (
        FIXED_TABLES["cpu"] if reproducible else choose_table(ON_A_CPU, FIXED_TABLES["cpu"])
    )
    assert bool(found["auto"].seconds) is not reproducible, "a timing may fall out differently the next time"
    assert "held dequantized" in found["always"].describe()
    assert found["never"].describe().startswith("affine 4 bit, multiplied by: library up to ")


@pytest.mark.parametrize(
    ("backend", "choice", "kept"), [("cpu", "auto", 0), ("cuda", "auto", 1), ("cuda", "always", 0)]
)
def test_experts_stay_quantized_on_a_gpu(
    backend: str, choice: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(backend, monkeypatch)
    monkeypatch.setattr(weight_form, "time_products", lambda *given: ON_A_CPU)
    model = nn.Sequential(nn.Linear(64, 64), SwitchLinear(64, 64, 2))
    nn.quantize(model, group_size=64, bits=4)
    form = settle_weights(model, make_config(dequantize=choice), mx.float32)
    assert form.held and form.keeps_experts == ("scales" in model.layers[1]) == bool(kept)
    experts = " except for experts; experts by: library up to 8 tokens each, dequantized beyond"
    assert form.describe() == "affine 4 bit, held dequantized" + experts * kept


@pytest.mark.parametrize(
    ("backend", "methods"), [("cpu", None), ("metal", None), ("cuda", EXPERT_TABLES["cuda"])]
)
@pytest.mark.parametrize("reproducible", [False, True])
def test_experts_that_stay_quantized_are_routed_on_cuda(
    backend: str, methods: MethodTable | None, reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the device alone, so that it is the same each time."""
    pretend(backend, monkeypatch)
    monkeypatch.setattr(weight_form, "time_products", lambda *given: ON_A_CPU)
    model = nn.Sequential(nn.Linear(64, 64), SwitchLinear(64, 64, 2))
    nn.quantize(model, group_size=64, bits=4)
    config = make_config(dequantize="never", reproducible=reproducible)
    form = settle_weights(model, config, mx.float32)
    assert not form.held and form.experts == methods == getattr(model.layers[1], "table", None)


def test_auto_keeps_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_form, "time_products", lambda *given: ON_A_CPU)
    config = engine_driver.make_config(Path("model"), memory_limit=1000)
    assert not settle_weights(make_model(), config, mx.float32).held


def test_a_reproducible_choice_does_not_depend_on_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_form, "get_memory_limit", lambda: 0)
    config = engine_driver.make_config(Path("model"), reproducible=True)
    assert settle_weights(make_model(), config, mx.float32).held
    config = engine_driver.make_config(Path("model"), reproducible=False)
    assert not settle_weights(make_model(), config, mx.float32).held


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_reproducible_choice_does_not_depend_on_the_machines_memory(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little memory is said; a form that rounds otherwise is not chosen for it."""
    pretend(backend, monkeypatch)
    config = engine_driver.make_config(Path("model"), reproducible=True)
    limited = engine_driver.make_config(Path("model"), reproducible=True, memory_limit=1000)
    for total in (10**12, 10**6, 0):
        monkeypatch.setattr(weight_form, "get_total_memory", lambda total=total: total)
        if total == 10**6:
            with pytest.raises(ConfigError, match=r"take 917.5 kB, .* 1.0 MB: set `never`"):
                settle_weights(make_model(), config, mx.float32)
        else:
            assert settle_weights(make_model(), config, mx.float32).held
        with pytest.raises(ConfigError, match="more than half of the limit of 1.0 kB"):
            settle_weights(make_model(), limited, mx.float32)
        for choice, held in (("never", False), ("always", True)):
            given = engine_driver.make_config(Path("model"), reproducible=True, dequantize=choice)
            assert settle_weights(make_model(), given, mx.float32).held == held


def test_on_metal_a_reproducible_model_stays_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("metal", monkeypatch)
    config = engine_driver.make_config(Path("model"), reproducible=True, memory_limit=1000)
    assert not settle_weights(make_model(), config, mx.float32).held


def test_plain_weights_have_no_form() -> None:
    assert settle_weights(nn.Sequential(nn.Linear(4, 4)), make_config(), mx.float32) == WeightForm()
