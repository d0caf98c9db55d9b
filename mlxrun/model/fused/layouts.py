"""Recognises the usual decoder layer by what it computes, whatever its family is called.

A part of a layer is called with stand-ins in place of its projections, norms and cache. What it makes of
their outputs must be what operations.py makes of them. A scaled residual, a norm in another place, another
activation or a gate gives other numbers. What it asks of `mx.fast.rms_norm` and `mx.fast.rope` says how it is
computed. So no weight is multiplied here.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.fused.joined_layers import can_join
from mlxrun.model.fused.operations import ARRAYS, HeadRule, NormRule, RotaryRule
from mlxrun.model.hooks.attention import RowKeys, RowKeysCache
from mlxrun.model.hooks.logit_rule import LogitRule

log = logging.getLogger(__name__)

# Names of the libraries' projections of one input, and of what follows.
ATTENTION_INPUTS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",), ("wq", "wk", "wv"))
ATTENTION_OUTPUTS = ("o_proj", "out_proj", "wo")
MLP_INPUTS = (("gate_proj", "up_proj"), ("gate_up_proj",), ("w1", "w3"))
MLP_OUTPUTS = ("down_proj", "w2")
ROWS = 2
OFFSETS = (3, 40000)  # positions of the trials: a model may scale queries from some position on
SPREAD = 6.0  # of the stand-ins' numbers: a model may clip large ones
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """`inputs`: names of the projections of queries, keys and values; `output`: of the last one. `scale`: of
    logits."""

    inputs: tuple[str, ...]
    output: str
    heads: HeadRule
    scale: float


@dataclass(frozen=True, slots=True)
class MLPLayout:
    """Names of the projections of gate and up, and of the last one."""

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A layer that computes h = x + attention(norms[0](x)), and then h + middle(norms[1](h)). The strings are
    names of its parts. `mlp`: None if the middle is computed by its own module."""

    norms: tuple[str, str]
    rules: tuple[NormRule, NormRule]
    attention: str
    middle: str
    attention_layout: AttentionLayout
    mlp: MLPLayout | None


def find_layout(block: nn.Module) -> BlockLayout | None:
    """The layout of a layer; None if it has another one."""
    names = list(inspect.signature(type(block).__call__).parameters)
    if names[2:4] != ["mask", "cache"]:
        return None
    parts = {name: part for name, part in block.items() if isinstance(part, nn.Module)}
    norms = {name: rule for name, part in parts.items() if (rule := read_norm(part)) is not None}
    for attention in (name for name in parts if name not in norms):
        layout = try_to_read(read_attention, parts[attention]) if len(norms) > 1 else None
        if layout is None:
            continue
        middles = [name for name in parts if name not in norms and name != attention]
        for first, second in itertools.permutations(norms, 2):
            for middle in middles:
                if try_to_read(_is_composed, block, first, attention, second, middle):
                    rules, mlp = (norms[first], norms[second]), try_to_read(read_mlp, parts[middle])
                    return BlockLayout((first, second), rules, attention, middle, layout, mlp)
    return None


def read_norm(module: nn.Module) -> NormRule | None:
    """How a norm with one weight is computed; None if it is no RMS norm."""
    weight = module.get("weight")
    if not isinstance(weight, mx.array) or weight.ndim != 1 or len(module) != 1:
        return None
    return try_to_read(_read_norm, module, weight)


def _read_norm(module: Any, weight: mx.array) -> NormRule | None:
    x = mx.zeros((1, 1, weight.size), dtype=weight.dtype)
    with _record_calls("rms_norm") as calls:
        result = module(x)
    if len(calls) != 1 or calls[0].result is not result or calls[0].given["x"] is not x:
        return None
    found: mx.array | None = calls[0].given["weight"]
    if found is None:
        return None
    if found is not weight:
        mx.eval(found)
    return NormRule(found, float(calls[0].given["eps"]))


# -- attention ------------------------------------------------------------------------------------------


class _TrialKeys(RowKeys):
    """Keys of all rows, which record the queries."""

    def __init__(self) -> None:
        self.attended: list[tuple[mx.array, LogitRule, mx.array]] = []

    def _attend(self, queries: mx.array, rule: LogitRule) -> mx.array:
        self.attended.append((queries, rule, _make_random(queries.shape, 9)))
        return self.attended[-1][2]


class _TrialCache(RowKeysCache):
    """A cache that records keys and values."""

    def __init__(self) -> None:
        self.offset = mx.array(OFFSETS, dtype=mx.int32)
        self.keys = _TrialKeys()
        self.updates: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowKeys, RowKeys]:
        self.updates.append((keys, values))
        self._fetched = self.keys
        return self.state


def read_attention(module: nn.Module) -> AttentionLayout | None:
    """The layout of a layer's attention; None if it has another one."""
    inputs = _find_names(module, ATTENTION_INPUTS)
    output = next((name for name in ATTENTION_OUTPUTS if name in module), None)
    if inputs is None or output is None:
        return None
    width = sum(module[name]["weight"].shape[0] for name in inputs)
    product = _make_random((ROWS, 1, width), 1)
    last, cache = _LastLayer(), _TrialCache()
    stub = _make_stub(module, _split_product(module, inputs, product) | {output: last})
    with _record_calls("rope") as turns, _record_calls("rms_norm") as norms:
        result = stub(mx.zeros((ROWS, 1, 8)), None, cache)
    if len(cache.updates) != 1 or len(cache.keys.attended) != 1 or result is not last.result:
        return None
    (keys, values), (queries, rule, attended) = cache.updates[0], cache.keys.attended[0]
    is_plain = rule == LogitRule(rule.scale) and keys.shape == values.shape and keys.shape[3] % 2 == 0
    if not is_plain or not _are_equal(last.given, attended.reshape(ROWS, 1, -1)):
        return None
    found = queries, mx.concatenate([keys[:, :, 0], values[:, :, 0]])
    for heads in _list_rules(queries, keys, turns, norms, cache.offset):
        expected = ARRAYS.make_heads(product, heads, cache.offset)
        if all(_are_equal(*pair) for pair in zip(found, expected, strict=True)):
            return AttentionLayout(inputs, output, heads, float(rule.scale))
    return None


def _list_rules(
    queries: mx.array, keys: mx.array, turns: Sequence[_Call], norms: Sequence[_Call], offsets: mx.array
) -> Iterator[HeadRule]:
    """The rules by which heads may have been made with these calls. Norms may have been called for queries or
    for keys first."""
    (_, heads, _, size), kv_heads = queries.shape, keys.shape[1]
    rotary: RotaryRule | None = None
    if turns:
        given: list[dict[str, Any]] = [{n: call.given.get(n) for n in _ROPE_NAMES} for call in turns]
        same = all(value is given[1][name] or value == given[1][name] for name, value in given[0].items())
        if len(turns) != 2 or not same or given[0]["offset"] is not offsets:
            return
        first = given[0]
        rotary = RotaryRule(
            first["dims"], bool(first["traditional"]), first["base"], first["scale"], first["freqs"]
        )
    if not norms:
        yield HeadRule(heads, kv_heads, size, None, rotary)
    elif len(norms) == 2 and all(call.given["weight"] is not None for call in norms):
        one, two = (NormRule(call.given["weight"], float(call.given["eps"])) for call in norms)
        if one.weight.shape == two.weight.shape == (size,):
            yield HeadRule(heads, kv_heads, size, (one, two), rotary)
            yield HeadRule(heads, kv_heads, size, (two, one), rotary)


# -- the middle, and the whole --------------------------------------------------------------------------


def read_mlp(module: nn.Module) -> MLPLayout | None:
    """The layout of a gated MLP with SiLU; None if it is another one."""
    inputs = _find_names(module, MLP_INPUTS)
    output = next((name for name in MLP_OUTPUTS if name in module), None)
    if inputs is None or output is None:
        return None
    width = sum(module[name]["weight"].shape[0] for name in inputs)
    product, last = _make_random((ROWS, 1, width), 2), _LastLayer()
    result = _make_stub(module, _split_product(module, inputs, product) | {output: last})(
        mx.zeros((ROWS, 1, 8))
    )
    same = result is last.result and _are_equal(last.given, ARRAYS.gate(product))
    return MLPLayout(inputs, output) if same else None


def _is_composed(block: nn.Module, first: str, attention: str, second: str, middle: str) -> bool:
    """Whether the layer adds attention of its `first` norm, and then the middle of its `second` norm."""
    stand_ins: dict[str, Callable[..., mx.array]] = {
        first: lambda x: 0.5 * x + 1,
        attention: lambda x, *_, **__: mx.tanh(x),
        second: lambda x: 0.25 * x - 1,
        middle: mx.sin,
    }
    x = _make_random((ROWS, 1, 8), 3)
    found = _make_stub(block, stand_ins)(x, None, _TrialCache())
    summed = x + stand_ins[attention](stand_ins[first](x))
    return _are_equal(found, summed + stand_ins[middle](stand_ins[second](summed)))


# -- stand-ins ------------------------------------------------------------------------------------------


class _LastLayer:
    """In place of a part's last projection: records its input."""

    given: mx.array | None = None

    def __init__(self) -> None:
        self.result = mx.zeros((ROWS, 1, 8))

    def __call__(self, x: mx.array) -> mx.array:
        self.given = x
        return self.result


def _find_names(module: nn.Module, alternatives: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The first of these that are all projections whose weights can be joined."""
    for names in alternatives:
        if all(name in module for name in names) and can_join([module[name] for name in names]):
            return names
    return None


def _split_product(module: Any, names: Sequence[str], product: mx.array) -> dict[str, Any]:
    """Stand-ins for the projections, which give the parts of their joined product."""
    ends = list(itertools.accumulate(module[name]["weight"].shape[0] for name in names))
    parts = mx.split(product, ends[:-1], axis=-1)
    return {name: (lambda x, own=part: own) for name, part in zip(names, parts, strict=True)}


def _make_stub(module: Any, replaced: Mapping[str, Any]) -> Any:
    """A copy of the module with stand-ins as these parts."""
    kind: Any = type(module)
    stub = kind.__new__(kind)
    nn.Module.__init__(stub)
    vars(stub).update(vars(module))
    dict.update(stub, {name: part for name, part in module.items() if name not in replaced})
    vars(stub).update(replaced)
    return stub


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a function of `mx.fast`: its arguments by name, and its result."""

    given: Mapping[str, Any]
    result: mx.array


_ROPE_NAMES = ("dims", "traditional", "base", "scale", "offset", "freqs")
_POSITIONAL = {"rms_norm": ("x", "weight", "eps"), "rope": ("x", "dims")}


@contextmanager
def _record_calls(name: str) -> Iterator[list[_Call]]:
    """Within the block, record the calls of this function of `mx.fast`."""
    original, calls = getattr(mx.fast, name), list[_Call]()

    def record(*args: Any, **kwargs: Any) -> mx.array:
        result: mx.array = original(*args, **kwargs)
        calls.append(_Call(dict(zip(_POSITIONAL[name], args, strict=False)) | kwargs, result))
        return result

    setattr(mx.fast, name, record)
    try:
        yield calls
    finally:
        setattr(mx.fast, name, original)


def _make_random(shape: Sequence[int], seed: int) -> mx.array:
    return SPREAD * mx.random.normal(shape, key=mx.random.key(seed))


def _are_equal(found: Any, expected: mx.array) -> bool:
    """Whether both are the same within rounding."""
    if not isinstance(found, mx.array) or found.shape != expected.shape:
        return False
    return bool(mx.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE).item())


def try_to_read(read: Callable[..., Any], *given: Any) -> Any:
    """The result; None if it raised, as a library's part may for stand-ins."""
    try:
        return read(*given)
    except Exception as error:
        log.debug("fused layers: %s: %s", type(given[0]).__name__, error)
        return None
