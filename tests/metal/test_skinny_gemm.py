"""The skinny GEMM, as Metal would run it, against the same in float64; and twins: a mistake planted into it
is found."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrun.model.fused import operations
from mlxrun.model.hooks import skinny_gemm
from mlxrun.model.hooks.skinny_gemm import (
    KERNELS,
    can_multiply_packed,
    count_inputs,
    multiply_evenly,
    multiply_few_rows,
)
from mlxrun.model.kernels import kernel_source
from tests.helpers.custom_kernels import forget_kernels
from tests.metal.attention_cases import ROUNDING, to_float64
from tests.metal.emulator.emulated_kernel import ORDERS, Emulator
from tests.metal.emulator.errors import EmulatorError
from tests.metal.layer_cases import make_random

HALVES = [dtype for dtype in ROUNDING if dtype != mx.float32]
FORMS = {
    "4 bit": (4, 64),
    "4 bit, small groups": (4, 32),
    "8 bit": (8, 64),
    "8 bit, large groups": (8, 128),
    "plain": (16, 0),
}
OUTPUTS = 40  # not a whole number of tiles
STEPS = 10  # more than a block has warps, so that some take two


def make_layer(form: str, dtype: mx.Dtype, steps: int = STEPS, outputs: int = OUTPUTS) -> Any:
    bits, group = FORMS[form]
    layer = nn.Linear(steps * 512 // bits, outputs, bias=False)
    layer.weight = make_random(layer.weight.shape, 1)
    made: Any = layer.to_quantized(group_size=group, bits=bits) if group else layer
    made.set_dtype(dtype)
    return made


def find_difference(layer: Any, x: mx.array, found: mx.array) -> float:
    """The largest difference from the product in float64, in units of the mean number. A weight is rounded to
    the type of the activations, as a dequantized one is. `found`: what the kernel has made."""
    weight = layer["weight"]
    if "scales" in layer:
        wide = {name: layer[name].astype(mx.float32) for name in ("scales", "biases")}
        weight = mx.dequantize(weight, **wide, group_size=layer.group_size, bits=layer.bits)
    exact = to_float64(x) @ to_float64(weight.astype(x.dtype)).T
    return float(np.abs(to_float64(found) - exact).max() / np.abs(exact).mean())


def set_least_blocks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for least in ("BLOCKS", "LIGHT_BLOCKS"):
        monkeypatch.setattr(skinny_gemm, least, count)


@pytest.fixture(autouse=True)
def use_many_tiles(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have as many tiles as for weights with many outputs."""
    set_least_blocks(1, monkeypatch)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, dtype: mx.Dtype, emulator: Emulator) -> None:
    layer = make_layer(form, dtype)
    x = make_random((11, count_inputs(layer)), 2, dtype)
    found = multiply_few_rows(layer, x)
    assert find_difference(layer, x, found) < 4 * ROUNDING[dtype]
    for emulator.order in ORDERS[1:]:
        emulator.guard = "begin" if emulator.order == "backward" else "end"
        assert mx.array_equal(multiply_few_rows(layer, x), found).item()


def compare_tiles(form: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether blocks of few and of many tiles give the same bits, without a gate and with one."""
    monkeypatch.setattr(skinny_gemm, "FEW_OUTPUTS", 0)  # a warp has three steps
    layer = make_layer(form, mx.bfloat16, 19)
    x = make_random((rows, 1, count_inputs(layer)), 2, mx.bfloat16)
    many = [multiply_few_rows(layer, x, gated) for gated in (False, True)]
    set_least_blocks(128, monkeypatch)
    few = [multiply_few_rows(layer, x, gated) for gated in (False, True)]
    return [mx.array_equal(*pair).item() for pair in zip(few, many, strict=True)]


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("form", ["4 bit", "plain"])
def test_blocks_of_few_tiles_give_the_same_bits(
    form: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of plain weights read several steps at once."""
    assert compare_tiles(form, rows, monkeypatch) == [True, True]


@pytest.mark.parametrize(
    "old, new", [("ahead * SETS * WARPS, steps - 1", "ahead, steps - 1"), ("step >= steps", "step > steps")]
)
def test_a_planted_mistake_of_several_steps_is_found(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of other steps; a step more than there are."""
    assert old in kernel_source.SKINNY_GEMM
    monkeypatch.setattr(kernel_source, "SKINNY_GEMM", kernel_source.SKINNY_GEMM.replace(old, new, 1))
    try:
        assert False in compare_tiles("plain", 5, monkeypatch)
    except EmulatorError:
        return


@pytest.mark.parametrize("form", ["4 bit", "8 bit", "plain"])
def test_a_row_has_the_same_bits_in_any_company(form: str) -> None:
    layer = make_layer(form, mx.bfloat16, 2, 24)
    x = make_random((max(KERNELS), count_inputs(layer)), 2, mx.bfloat16)
    alone = multiply_few_rows(layer, x[5:6])
    for rows in KERNELS:
        found = multiply_few_rows(layer, x[:rows])
        assert find_difference(layer, x[:rows], found) < 4 * ROUNDING[mx.bfloat16]
        assert mx.array_equal(found[5:6], alone).item(), rows


@pytest.mark.parametrize("form", ["4 bit", "8 bit"])
def test_a_weight_of_many_outputs_has_blocks_of_few_warps(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many for each number of rows, since another number sums in another order."""
    layer = make_layer(form, mx.bfloat16, 19, 24)
    x = make_random((max(KERNELS), count_inputs(layer)), 2, mx.bfloat16)
    monkeypatch.setattr(skinny_gemm, "MANY_OUTPUTS", 24)
    expected = multiply_few_rows(layer, x)
    assert find_difference(layer, x, expected) < 4 * ROUNDING[mx.bfloat16]
    for rows in (1, *KERNELS):
        assert mx.array_equal(multiply_few_rows(layer, x[:rows]), expected[:rows]).item(), rows
    assert find_gate_problem(mx.bfloat16, 11, form) == ""


def find_many_warps_problem(form: str, gated: bool = False) -> str:
    """Whether a weight of few outputs, whose blocks have many warps, is multiplied as it should be: the same
    bits for each number of rows, though most rows have half of the warps, with the sums of two each."""
    layer = make_layer(form, mx.bfloat16, 36, 24 * (1 + gated))
    x = make_random((max(KERNELS), count_inputs(layer)), 2, mx.bfloat16)
    if not gated and find_difference(layer, x, multiply_few_rows(layer, x)) > 4 * ROUNDING[mx.bfloat16]:
        return "another product"
    # The halves of a sum cancel each other, so what is left are the errors of its order.
    for name in {"weight", "scales", "biases"} & set(layer):
        layer[name] = mx.concatenate([layer[name][:, : layer[name].shape[1] // 2]] * 2, axis=1)
    half = x[:, : x.shape[1] // 2]
    x = mx.concatenate([half, -half], axis=1)
    expected = multiply_few_rows(layer, x, gated)
    same = (mx.array_equal(multiply_few_rows(layer, x[:rows], gated), expected[:rows]) for rows in (1, 32))
    return "" if all(each.item() for each in same) else "other bits"


@pytest.fixture
def use_blocks_of_few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have as few tiles as for weights with few outputs, since the sums of many warps take memory."""
    set_least_blocks(128, monkeypatch)


@pytest.mark.usefixtures("use_blocks_of_few_outputs")
@pytest.mark.parametrize("form", ["4 bit", "plain"])
def test_a_weight_of_few_outputs_has_blocks_of_many_warps(form: str) -> None:
    assert [find_many_warps_problem(form, gated) for gated in (False, True)] == ["", ""]


@pytest.mark.usefixtures("use_blocks_of_few_outputs")
@pytest.mark.parametrize(
    "old, new, found",
    [
        ("sums[tile][column][e] += kept[tile][column][e];", ";", "another product"),
        ("warp + set * WARPS", "warp * SETS + set", "other bits"),
    ],
)
def test_a_planted_mistake_of_two_sets_is_found(
    old: str, new: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first set is left out; the sets of other warps."""
    assert old in kernel_source.SKINNY_GEMM
    monkeypatch.setattr(kernel_source, "SKINNY_GEMM", kernel_source.SKINNY_GEMM.replace(old, new, 1))
    forget_kernels()
    assert find_many_warps_problem("plain") == found


@pytest.mark.parametrize("form", ["4 bit", "plain"])
def test_rows_of_any_shape_have_the_same_bits(form: str) -> None:
    layer = make_layer(form, mx.bfloat16, 2, 24)
    inputs = count_inputs(layer)
    x = make_random((6, inputs), 2, mx.bfloat16)
    expected = multiply_few_rows(layer, x)
    assert expected.shape == (6, 24)
    for shape, made in (
        ((6, 1, inputs), (6, 1, 24)),
        ((2, 3, inputs), (2, 3, 24)),
        ((6, 4, 1, inputs // 4), (6, 1, 24)),  # heads
    ):
        found = multiply_few_rows(layer, x.reshape(shape))
        assert found.shape == made and mx.array_equal(found.reshape(6, 24), expected).item()


def test_more_rows_than_a_kernel_takes() -> None:
    layer = make_layer("plain", mx.bfloat16, 2, 24)
    x = make_random((67, count_inputs(layer)), 2, mx.bfloat16)
    expected = mx.concatenate([multiply_few_rows(layer, x[:64]), multiply_few_rows(layer, x[64:])])
    for shape in ((67, 1, -1), (1, 67, -1), (67, 4, 1, -1)):
        found = multiply_evenly(layer, x.reshape(shape))
        assert mx.array_equal(found.reshape(67, 24), expected).item()


def find_gate_problem(dtype: mx.Dtype, rows: int, form: str = "plain") -> str:
    """Whether silu(gate) * up of the product is what the kernel of gates makes of it."""
    layer = make_layer(form, dtype, 2, 2 * OUTPUTS)
    x = (3 * make_random((rows, 1, count_inputs(layer)), 2)).astype(dtype) / 8
    expected = operations.KERNELS.gate(multiply_few_rows(layer, x))
    found = multiply_few_rows(layer, x, gated=True)
    return "" if mx.array_equal(found, expected).item() else "differs"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", KERNELS)
def test_a_gate_in_the_product_has_the_bits_of_one_behind_it(dtype: mx.Dtype, rows: int) -> None:
    assert find_gate_problem(dtype, rows - 3) == ""


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", ["4 bit", "8 bit"])
def test_a_gate_in_a_quantized_product_has_the_bits_of_one_behind_it(form: str, dtype: mx.Dtype) -> None:
    assert find_gate_problem(dtype, 11, form) == ""


def find_sum_problem(form: str, dtype: mx.Dtype, rows: int) -> str:
    """Whether a sum in the product's kernel is that of the rounded product."""
    layer = make_layer(form, dtype, 2)
    inputs = count_inputs(layer)
    x = make_random((rows, 4, 1, inputs // 4), 2, dtype)
    added = 30 * make_random((rows, 1, OUTPUTS), 3, dtype)
    found = multiply_few_rows(layer, x, added=added)
    return "" if mx.array_equal(found, added + multiply_few_rows(layer, x)).item() else "differs"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", ["4 bit", "plain"])
def test_a_sum_in_the_product_has_the_bits_of_one_behind_it(form: str, dtype: mx.Dtype) -> None:
    assert find_sum_problem(form, dtype, 11) == ""


@pytest.mark.parametrize(
    "old, new",
    [
        ("float(added[at]) + float(number)", "float(added[at]) + totals[0][output][held]"),
        ("added[at]", "added[i]"),
    ],
)
def test_a_planted_mistake_of_the_sum_is_found(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is not rounded; the numbers of another row."""
    assert old in kernel_source.SKINNY_GEMM
    monkeypatch.setattr(kernel_source, "SKINNY_GEMM", kernel_source.SKINNY_GEMM.replace(old, new, 1))
    assert any(find_sum_problem("plain", dtype, 11) for dtype in HALVES)


GATED_MISTAKES = {
    "the gate is not rounded": ("gate = float(T(totals[0][output][held]))", "gate = totals[0][output][held]"),
    "up is not rounded": (
        "up = float(T(totals[0][16 * own + output][held]))",
        "up = totals[0][16 * own + output][held]",
    ),
    "the gate for up": ("totals[0][16 * own + output][held]", "totals[0][output][held]"),
    "up of the next tile": ("tile / own * outputs + output", "tile / own * (outputs - 16) + output"),
    "all tiles from the gate": ("tile / own * outputs + output", "output"),
    "outputs that no block has": ("- SPARE", "+ SPARE"),
    "blocks that lie apart": ("first = BLOCK_X * 16 * own", "first = BLOCK_X * 16 * TILES"),
    "the sign of the gate": ("gate < 0 ? part", "gate > 0 ? part"),
}


@pytest.mark.parametrize("name", GATED_MISTAKES)
def test_a_planted_mistake_of_the_gate_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = GATED_MISTAKES[name]
    assert old in kernel_source.SKINNY_GEMM
    plain = skinny_gemm.compile_kernel("metal", ("weight",), False)
    monkeypatch.setattr(kernel_source, "SKINNY_GEMM", kernel_source.SKINNY_GEMM.replace(old, new, 1))
    wrong = skinny_gemm.compile_kernel("metal", ("weight",), True)
    kernels = {False: plain, True: wrong}
    monkeypatch.setattr(
        skinny_gemm, "compile_kernel", lambda backend, names, gated, adds, warps: kernels[gated]
    )
    try:
        assert any(find_gate_problem(dtype, 11) for dtype in HALVES)
    except EmulatorError:
        return


MISTAKES = {
    "the last inputs are left out": ("step >= steps", "step >= steps - 1"),
    "other inputs of the rows": ("(TAKEN / 8) + eight]", "(TAKEN / 8) + (eight ^ 1)]"),
    "the scale of the next output": ("repeat<T>(scales[group])", "repeat<T>(scales[group + 1])"),
    "no offset": ("repeat<T>(biases[group])", "0"),
    "the first row for all": ("MIN(column * 8 + place, rows - 1)", "0"),
    "neighbours of x": ("one = BITS == 4 ? v.x[i]", "one = BITS == 4 ? v.x[i + 2]"),
    "the other half of the outputs": ("const int side = i % 2,", "const int side = 1 - i % 2,"),
    "another pair of the word": ("2 * turn + i / 2 :", "2 * turn + 1 - i / 2 :"),
    "half of the warps are not added": ("most = WARPS / 2; most > 0", "most = WARPS / 4; most > 0"),
    "no barrier": ("      BARRIER;\n    }", "    }"),
    "a row has another place in the sum": ("const int held = row ^", "const int held = row +"),
    "beyond the outputs": (
        "MIN(first + tile % own * 16 + side * 8 + place, outputs - 1)",
        "first + tile % own * 16 + place",
    ),
    "written beyond the outputs": ("if (first + output >= outputs) continue;", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MISTAKES[name]
    layer = make_layer("4 bit", mx.float16)
    x = make_random((11, layer.weight.shape[1] * 8), 2, mx.float16)
    assert old in kernel_source.SKINNY_GEMM
    monkeypatch.setattr(kernel_source, "SKINNY_GEMM", kernel_source.SKINNY_GEMM.replace(old, new, 1))
    forget_kernels()
    try:
        differences = []
        for emulator.order in ORDERS:
            differences.append(find_difference(layer, x, multiply_few_rows(layer, x)))
    except EmulatorError:
        return
    assert not max(differences) < 4 * ROUNDING[mx.float16]


def test_what_the_kernel_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("4 bit", mx.float16)
    assert not can_multiply_packed(layer, mx.float16), "Metal has a product of its own"
    monkeypatch.setattr(skinny_gemm, "get_backend", lambda: "cuda")
    assert can_multiply_packed(layer, mx.float16)
    assert not can_multiply_packed(layer, mx.bfloat16), "activations of another type"
    assert not can_multiply_packed(make_layer("4 bit", mx.float32), mx.float32)
    for form in ({"bits": 6}, {"mode": "mxfp4"}, {"group_size": 16}):
        other = make_layer("4 bit", mx.float16)
        vars(other).update(form)
        assert not can_multiply_packed(other, mx.float16), form
    short = nn.QuantizedLinear(192, 8, group_size=64, bits=4)
    short.set_dtype(mx.float16)
    assert not can_multiply_packed(short, mx.float16)
