"""The stand-in of the kernel against attention over plain arrays; the kernel itself needs a GPU."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.hooks.logit_rule import LogitRule
from mlxrun.model.kernels.kernel_source import HEADERS, JOIN, PAGE, SPLIT
from mlxrun.model.kv.paged import attention_kernel
from mlxrun.model.kv.paged.attention_kernel import PagedRows, attend_gathered, can_attend
from mlxrun.model.kv.paged.page_table import PageTable

LENGTHS = (1, PAGE, 3 * PAGE - 5, PAGE + 1)


SINKS, TURNED = (mx.random.normal(shape, key=mx.random.key(4)) for shape in ((4,), (5, 4, 1, 8)))
FORMS = {
    "plain": LogitRule(0.3),
    "narrow window": LogitRule(0.3, 3),
    "wide window": LogitRule(0.3, PAGE + 7),
    "sinks": LogitRule(0.3, sinks=SINKS),
    "window and sinks": LogitRule(0.3, PAGE + 7, SINKS),
    "cap": LogitRule(0.3, cap=2.0),
    "window and cap": LogitRule(0.3, 3, cap=0.5),
    "latent": LogitRule(0.3, positions=TURNED),
}


def attend_by_definition(
    query: mx.array, keys: mx.array, values: mx.array, rule: LogitRule, turned: mx.array | None
) -> mx.array:
    """One row in float64: query [heads, D], keys and values [tokens, KV heads, D] -> [heads, D]."""
    q, k, v = (np.array(a, dtype=np.float64) for a in (query, keys, values))
    result = []
    for head, own in enumerate(q):
        at = head * k.shape[1] // len(q)
        scores = k[:, at] @ own * rule.scale
        if turned is not None:
            scores = scores + v[:, 0] @ np.array(turned[head, 0], dtype=np.float64)
        if rule.cap:
            scores = rule.cap * np.tanh(scores / rule.cap)
        weights, sink = np.exp(scores), 0.0
        if rule.sinks is not None:
            sink = np.exp(float(rule.sinks[head]))
        result.append(weights @ (k if turned is not None else v)[:, at] / (weights.sum() + sink))
    return mx.array(np.stack(result).astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
def test_rows_attend_to_their_own_tokens(form: str) -> None:
    rule, latent = FORMS[form], form == "latent"
    heads, kv_heads, widths = 4, 1 if latent else 2, (32, 8 if latent else 32)
    table = PageTable(None)
    table.add_capacity(12)
    for row, length in enumerate(LENGTHS):
        table.add_row(str(row), length)
    keys, values = (
        mx.random.normal((13 * PAGE, kv_heads, width), key=mx.random.key(i)) for i, width in enumerate(widths)
    )
    queries = mx.random.normal((len(LENGTHS) + 1, heads, 1, widths[0]), key=mx.random.key(3))
    tables = table.list_columns([str(row) for row in range(len(LENGTHS))])
    tables.append([0] * len(tables[0]))  # a dummy row
    rows = PagedRows(mx.array(tables), mx.array([*LENGTHS, 0]))
    found = attend_gathered(queries, keys, values, rows, rule)
    if not latent:
        joined = attend_gathered(queries, mx.concatenate([keys, values]), None, rows, rule)
        assert mx.array_equal(joined, found).item()
    for row, length in enumerate(LENGTHS):
        first = 0 if rule.window is None else max(length - rule.window, 0)
        slots = mx.array(table.list_slots(str(row), first, length))
        turned = TURNED[row] if latent else None
        expected = attend_by_definition(queries[row, :, 0], keys[slots], values[slots], rule, turned)
        assert mx.allclose(found[row, :, 0], expected, atol=1e-5).item()
    assert not mx.any(found[-1]).item()


def test_shapes_that_the_kernel_does_not_cover_are_known() -> None:
    assert can_attend(32, 8, 128, 128) and can_attend(32, 32, 80, 80) and can_attend(16, 4, 192, 128)
    assert not can_attend(8, 2, 30, 30)  # no four threads can share a key
    assert can_attend(128, 1, 512, 512, 64) and can_attend(20, 1, 256, 256, 32)  # latent
    assert not can_attend(8, 1, 512, 512, 2)  # no four threads can share the rotary part
    assert not can_attend(8, 1, 576, 512)
    assert not can_attend(6, 4, 64, 64)


@pytest.mark.parametrize("backend", attention_kernel.JOIN_THREADS)
def test_a_latent_vector_is_the_value_and_blocks_are_not_too_large(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernel, "get_backend", lambda: backend)
    queries, keys, turned = mx.zeros((1, 8, 1, 512)), mx.zeros((PAGE, 1, 512)), mx.zeros((PAGE, 1, 64))
    rule = LogitRule(1, positions=mx.zeros((1, 8, 1, 64)))
    shape = attention_kernel._describe_shape(queries, keys, turned, rule)
    assert (shape.key_dim, shape.value_dim, shape.turn_dim) == (512, 512, 64)
    assert attention_kernel._count_teams(shape) == {"cuda": 2, "metal": 1}[backend]
    assert repr(shape.scale) == "1.0"  # a number of the source, which ends in `f`


def test_both_languages_define_the_same_names() -> None:
    cuda, metal = (set(re.findall(r"#define ([A-Z_]+)", header)) for header in HEADERS.values())
    assert cuda == metal and len(cuda) == 10


@pytest.mark.parametrize("backend", HEADERS)
@pytest.mark.parametrize("latent", [False, True])
def test_nothing_is_left_to_spell_in_either_language(backend: str, latent: bool) -> None:
    """By the preprocessor of the languages: each name is a macro or a constant of the kernel."""
    parts = re.split(r"^#(if LATENT|if CAPPED|if JOINED|else|endif)$", SPLIT, flags=re.MULTILINE)
    assert len(parts) % 2 and parts[1::2].count("endif") == 6
    kept, source = [True], parts[0]
    for directive, text in zip(parts[1::2], parts[2::2], strict=True):
        if directive.startswith("if"):
            kept.append(latent or directive != "if LATENT")
        elif directive == "else":
            kept[-1] = not kept[-1]
        else:
            kept.pop()
        source += text if all(kept) else ""
    split, join = (re.sub(r"^#define .*$", "", text, flags=re.MULTILINE) for text in (source, JOIN))
    assert ("TURN_DIM" in split) is latent
    for source in (split, join):
        assert source.count("{") == source.count("}") and "#" not in source
        names = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", source))
        macros = set(re.findall(r"#define ([A-Z_]+)", HEADERS[backend] + SPLIT)) | {"SCALE", "CAP"}
        constants = {
            *("KV_HEADS", "NUM_HEADS", "PARTS", "HEADS", "KEY_DIM", "VALUE_DIM", "LANES", "KEY_PART"),
            *("VALUE_PART", "KEYS_A_WARP", "WARPS", "TEAMS", "UNROLL", "PAGE_TOKENS", "WINDOW", "SINKS"),
            *("TURN_DIM", "TURN_PART"),
        }
        assert names <= macros | constants
