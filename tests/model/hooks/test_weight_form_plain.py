"""For which rows of decode steps plain weights are multiplied by the kernel: where that takes less time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model import doctor
from mlxrun.model.fused.fused_blocks import list_fused
from mlxrun.model.fused.operations import ARRAYS
from mlxrun.model.hooks import even_products, install, product_timing, skinny_gemm, weight_form
from mlxrun.model.hooks.even_products import EVERY_ROW, hook_even_products, list_even
from mlxrun.model.hooks.product_timing import PLAIN_WIDTHS, StepProduct, time_plain_products
from mlxrun.model.hooks.quantized_layers import MethodTable
from mlxrun.model.hooks.weight_form import PLAIN_WEIGHTS, settle_plain_products
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check.product_checks import check_products
from mlxrun.model.run.model_caller import ModelCaller
from tests.helpers.engine_driver import make_config
from tests.helpers.fused_models import count_products, multiply_rows
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo

FASTER = {"library": dict.fromkeys(PLAIN_WIDTHS, 10.0), "packed": {1: 12.0, 8: 9.0, 32: 9.4, 64: 30.0}}
CHOSEN = MethodTable(((1, "library"), (32, "packed"), (65, "library")))
SLOWER = {"library": dict.fromkeys(PLAIN_WIDTHS, 10.0), "packed": dict.fromkeys(PLAIN_WIDTHS, 12.0)}
EVEN = {"library": dict.fromkeys(PLAIN_WIDTHS, 10.0), "packed": dict.fromkeys(PLAIN_WIDTHS, 10.5)}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel covers all weights. The rows of each of its products."""
    monkeypatch.setattr(even_products, "can_multiply_plain", lambda layer, dtype: True)
    return count_products(monkeypatch)


def make_layers() -> nn.Module:
    mx.random.seed(1)
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)), nn.Linear(32, 64, bias=False))
    assert hook_even_products(layers, mx.float32) == 7
    return layers


def test_both_methods_are_timed_in_each_width(rows: list[int]) -> None:
    model, used = make_layers(), []

    def use(method: Any) -> None:
        used.append(method)
        even_products.use_table(layers, MethodTable(((1, method),)))

    layers = list_even(model)
    seconds = time_plain_products([StepProduct(layer, (1, 32)) for layer in layers], use, mx.float32)
    assert {name: tuple(times) for name, times in seconds.items()} == {
        "library": PLAIN_WIDTHS,
        "packed": PLAIN_WIDTHS,
    }
    assert all(time > 0 for times in seconds.values() for time in times.values())
    assert used == ["library", "packed"] * 12, "in turns"
    assert sorted(rows) == [1] * 14 + [8] * 7 + [32] * 7 + [64] * 7, "traced once, and then launched"


def test_lazy_weights_are_not_computed_in_each_call(rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def measure(compute: Any) -> tuple[float, float]:
        graph = io.StringIO()
        mx.export_to_dot(graph, *compute())
        graphs.append(graph.getvalue())
        return 1.0, 0.0

    monkeypatch.setattr(product_timing, "time_graph", measure)
    layer = nn.Linear(32, 32)
    layer.weight, layer.bias = mx.tanh(layer.weight), mx.tanh(layer.bias)
    time_plain_products([StepProduct(layer, (1, 32))], lambda method: None, mx.float32)
    assert len(graphs) == 24 and all("AddMM" in graph and "Tanh" not in graph for graph in graphs)


def time_by(seconds: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """Let the products take these times. The number of the timed ones in each call."""
    calls: list[int] = []

    def measure(products: Any, use_method: Any, dtype: mx.Dtype) -> Any:
        calls.append(len(products))
        return seconds

    patch.setattr(weight_form, "time_plain_products", measure)
    return calls


@pytest.mark.parametrize(
    ("seconds", "table"),
    [
        (FASTER, CHOSEN),
        (SLOWER, MethodTable(((65, "library"),))),
        (EVEN, MethodTable(((64, "packed"), (65, "library")))),
    ],
)
def test_rows_are_multiplied_by_the_kernel_unless_the_library_is_clearly_faster(
    seconds: Any, table: MethodTable, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves launches besides, which are not timed. The twins: where the library is, where it is not."""
    calls, model = time_by(seconds, monkeypatch), make_layers()
    form = settle_plain_products(model, PLAIN_WEIGHTS, [], mx.float32)
    assert form.plain == table and calls == [5], "four layers of the first shape, one of the other"
    for count in (1, 2, 8, 9, 32, 33, 64, 65):
        model.layers[0](mx.ones((count, 1, 32)))
    assert rows == [count for count in (1, 2, 8, 9, 32, 33, 64, 65) if table.choose(count) == "packed"]
    again = settle_plain_products(make_layers(), PLAIN_WEIGHTS, [], mx.float32, form.seconds)
    assert again == form and len(calls) == 1, "times are kept with the verdict"


def test_without_plain_weights_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = time_by(FASTER, monkeypatch)
    assert (
        settle_plain_products(nn.Sequential(nn.Linear(4, 4)), PLAIN_WEIGHTS, [], mx.float32) == PLAIN_WEIGHTS
    )
    assert calls == [] and PLAIN_WEIGHTS.describe_plain() == ""


def test_what_was_chosen_is_described(rows: list[int], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    time_by(FASTER, monkeypatch)
    with caplog.at_level("INFO"):
        form = settle_plain_products(make_layers(), PLAIN_WEIGHTS, [], mx.float32)
    text = (
        "rows of decode steps are multiplied by: the library up to 1 rows, mlxrun's kernel up to 32 rows, "
        "the library beyond"
    )
    assert caplog.messages == [f"plain weights: {text}"]
    first, *times = doctor.report_weights(form)
    assert (first.name, first.value, first.facts) == ("plain", text, {"methods": CHOSEN.entries})
    assert [(found.name, found.facts["seconds"]) for found in times] == [
        ("plain library", FASTER["library"]),
        ("plain packed", FASTER["packed"]),
    ]


def load(folder: Path, **options: Any) -> ModelCaller:
    config = make_config(folder, **options)
    return load_caller(config, load_model_info(config.model, weights=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_is_timed_when_it_is_loaded(
    fused: bool, zoo: Zoo, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused layers as they are, with joined weights; else layers of the shapes that take most of the work."""
    monkeypatch.setattr(install, "uses_gpu", lambda: fused)
    calls = time_by(FASTER, monkeypatch)
    caller = load(zoo.text("llama"))
    layers = list_fused(caller.model)
    assert caller.weights.plain == CHOSEN == list_even(caller.model)[0].table
    assert "even products" in [hook.name for hook in caller.hooks]
    assert len(calls) == 1 and bool(layers) is fused
    if fused:
        products = list(layers[0].list_products(ARRAYS))
        assert calls == [4 * min(len(layers), install.TIMED_LAYERS)] and len(products) == 4
        outputs = [product.compute(mx.ones((2, *product.shape))) for product in products]
        size = layers[0].second.weight.size
        assert outputs[1].shape == outputs[3].shape == (2, 1, size)


@pytest.mark.parametrize(
    "options", [{"reproducible": True}, {"load_check": False}, {"adapters": {"a": "folder"}}]
)
def test_settings_by_which_nothing_is_timed(
    options: dict[str, Any], zoo: Zoo, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In reproducible mode all rows are multiplied by the kernel, whatever the times are."""
    calls = time_by(FASTER, monkeypatch)
    config = make_config(zoo.text("llama"), **options)
    if "adapters" in options:
        assert not install.may_multiply_evenly(config)
        return
    caller = load(zoo.text("llama"), **options)
    tables = {layer.table.entries for layer in list_even(caller.model)}
    assert tables == ({EVERY_ROW.entries} if "reproducible" in options else set())
    assert calls == [] and caller.weights.plain is None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_kernel_is_replaced_by_the_library(
    wrong: bool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    time_by(FASTER, monkeypatch)
    model = make_layers()
    settle_plain_products(model, PLAIN_WEIGHTS, [], mx.float32)
    if wrong:
        monkeypatch.setattr(
            skinny_gemm, "multiply_few_rows", lambda layer, x, *more: 1.05 * multiply_rows(layer, x)
        )
    (check,) = check_products(model)
    assert check.passed is not wrong and bool(list_even(model)) is not wrong
    if not wrong:
        assert set(rows) == {2, 9, 17}, "each kernel that may be used"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_passes_its_load_check(
    wrong: bool, zoo: Zoo, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    time_by(FASTER, monkeypatch)
    if wrong:
        monkeypatch.setattr(
            skinny_gemm, "multiply_few_rows", lambda layer, x, *more: 1.05 * multiply_rows(layer, x)
        )
    report = probe_model(zoo.text("llama"))
    assert list_failed(report) == (["products of quantized weights"] if wrong else [])
    assert report.weights.plain == CHOSEN and (wrong or 3 in rows)
