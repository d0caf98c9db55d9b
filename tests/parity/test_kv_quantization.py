"""Quantized rows: the library's own loop with a quantized cache is the ORACLE, for each row among others.

A row's answer depends on nobody else, and not on the prefix cache either. Planted bugs are found by the load
check when the model is loaded, and without a load check by the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.core.request import TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.model.hooks import install
from mlxrun.model.kv.ragged import decode_batch
from mlxrun.model.kv.ragged.layer_caches import RowView
from mlxrun.model.kv.ragged.quantized_buffer import QuantizedArray, QuantizedBuffer
from mlxrun.model.kv.ragged.row_group import RowGroup, RowKeysValues
from tests.helpers import engine_driver, oracle, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.oracle import Answer

Patch = pytest.MonkeyPatch
PROMPTS = text_models.prompts(0, (2, 5, 14, 40))
JOINS = (0, 9, 0, 4)
COUNT, STARTED = 16, 3  # tokens of an answer; a `kv_start` that one row crosses


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models whose heads divide into groups of 32."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for family in ("llama", "qwen3_next"):
            patch.setitem(text_models.CONFIGS, family, {**text_models.CONFIGS[family], "head_dim": 32})
            made[family] = tmp_path_factory.mktemp(family) / "model"
            text_models.build(family, made[family])
    yield made


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    engine_driver.use_small_groups(monkeypatch)
    # A number that rounds otherwise may be quantized to the next step, which no tolerance allows for.
    monkeypatch.setattr(install, "needs_quick_gates", lambda: False)


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> list[Answer]:
    return compute_answers(folders["llama"], 4, STARTED)


def compute_answers(folder: Path, bits: int, start: int) -> list[Answer]:
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    return [oracle.text_answer(folder, prompt, COUNT, 2048, **options) for prompt in PROMPTS]


def serve(folder: Path, bits: int, start: int, **options: Any) -> tuple[Engine, list[TokenEvent]]:
    engine = engine_driver.make_real_engine(folder, kv_bits=bits, kv_start=start, **options)
    asks = [
        TimedRequest(engine_driver.make_text_request(str(i), prompt, max_tokens=COUNT), at)
        for i, (prompt, at) in enumerate(zip(PROMPTS, JOINS, strict=True))
    ]
    events = engine_driver.run_requests(engine, asks)
    return engine, [events[str(i)] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(("family", "bits", "start"), [("llama", 8, 0), ("qwen3_next", 4, STARTED)])
def test_rows_are_quantized_as_the_library_does(
    folders: dict[str, Path], family: str, bits: int, start: int
) -> None:
    """Joins, departures and moves between groups; `start` as `quantized_kv_start`."""
    engine, events = serve(folders[family], bits, start)
    for event, answer in zip(events, compute_answers(folders[family], bits, start), strict=True):
        engine_driver.check_answer(event, answer)
    assert engine.load_check is not None
    described = engine.load_check.describe()
    assert (described["kv_bits"], described["kv_group_size"], described["kv_start"]) == (bits, 32, start)
    assert [check.passed for check in engine.load_check.checks if check.name == "decode quantized"] == [True]


def test_a_hit_is_what_a_cold_request_computes(folders: dict[str, Path]) -> None:
    """Only prompts are cached, and exactly: what a quantized row holds is not what its tokens give alone.
    The twin copies it all the same."""
    cold = answer_second_turn(folders["llama"], "none")
    assert np.allclose(answer_second_turn(folders["llama"], "memory"), cold, atol=1e-4)
    planted = answer_second_turn(folders["llama"], "memory", view_packed_row)
    assert not np.allclose(planted, cold, atol=1e-3)


def answer_second_turn(folder: Path, backend: str, plant: Any = None) -> np.ndarray:
    """Logprobs of an answer whose prompt begins with another prompt and its answer. `plant`: in place of
    `view_row`, once the engine is built."""
    engine = engine_driver.make_real_engine(folder, kv_bits=4, backend=backend)
    if plant is not None:
        batch = engine_driver.get_runner(engine)._decoder.batch
        batch.view_row = partial(plant, batch)
    first = engine_driver.make_text_request("first", PROMPTS[3], max_tokens=40)
    answer = engine_driver.run_requests(engine, [first])["first"].tokens
    turn = engine_driver.make_text_request("second", [*PROMPTS[3], *answer, *range(7, 12)], max_tokens=4)
    event = engine_driver.run_requests(engine, [turn])["second"]
    assert (event.num_cached_tokens > 0) == (backend == "memory")
    return engine_driver.list_logprobs(event)


def view_packed_row(self: Any, rid: str) -> tuple[int, RowView]:
    group, index = next((g, g.ids.index(rid)) for g in self.groups if rid in g.ids)
    length = group.lengths[index]
    rows = [buffer.view(length) for buffer in group.buffers]
    plain = [[dequantize(a)[index : index + 1] for a in row] for row in rows]
    return length, RowView(tuple(RowKeysValues(*row, length) for row in plain))


def dequantize(array: QuantizedArray | mx.array) -> mx.array:
    if isinstance(array, mx.array):
        return array
    return mx.dequantize(*array.parts, array.form.group_size, array.form.bits)


# -- what is planted ----------------------------------------------------------------------------------------


def none(monkeypatch: Patch) -> None:
    """Nothing."""


def scales_stay_where_they_were(monkeypatch: Patch) -> None:
    """The row that takes the place of one that left keeps that one's scales."""
    original = QuantizedBuffer.remove_rows

    def remove_rows(self: QuantizedBuffer, moves: Mapping[int, int], rows: int) -> None:
        scales, indices = self._parts[1], mx.array([*moves.values()], mx.int32)
        assert scales.keys is not None and scales.values is not None
        before = scales.keys[indices] + 0, scales.values[indices] + 0
        original(self, moves, rows)
        if moves:
            scales.keys[indices], scales.values[indices] = before

    monkeypatch.setattr(QuantizedBuffer, "remove_rows", remove_rows)


def biases_of_the_first_row(monkeypatch: Patch) -> None:
    """A row takes the biases of another one of its group."""
    original = QuantizedBuffer.view

    def view(self: QuantizedBuffer, width: int) -> tuple[QuantizedArray, QuantizedArray]:
        pair = original(self, width)
        return tuple(replace(a, biases=mx.broadcast_to(a.biases[:1], a.biases.shape)) for a in pair)

    monkeypatch.setattr(QuantizedBuffer, "view", view)


def masks_dropped(monkeypatch: Patch) -> None:
    """Quantized rows see the padding of their group."""
    original = RowGroup.make_mask

    def make_mask(self: RowGroup, width: int, window: int | None) -> mx.array | None:
        return None if self.bucket > decode_batch.QUANTIZED else original(self, width, window)

    monkeypatch.setattr(RowGroup, "make_mask", make_mask)


def quantized_from_the_start(monkeypatch: Patch) -> None:
    """`start` is not looked at."""
    original = decode_batch.DecodeBatch.pick_bucket

    def find_bucket(self: Any, length: int) -> int:
        bucket = original(self, length)
        is_exact = self._quantization is not None and bucket < decode_batch.QUANTIZED
        return bucket + decode_batch.QUANTIZED if is_exact else bucket

    monkeypatch.setattr(decode_batch.DecodeBatch, "pick_bucket", find_bucket)


BUGS = [scales_stay_where_they_were, biases_of_the_first_row, masks_dropped, quantized_from_the_start]


@pytest.mark.parametrize("plant", [none, *BUGS])
def test_planted_bugs_are_found(
    folders: dict[str, Path], answers: list[Answer], monkeypatch: Patch, plant: Callable[[Patch], None]
) -> None:
    """By the load check, which names the setting, and by the comparison."""
    plant(monkeypatch)
    _, events = serve(folders["llama"], 4, STARTED, load_check=False)
    broken = any(map(engine_driver.has_other_answer, events, answers))
    assert broken == (plant is not none)
    if broken:
        with pytest.raises(ConfigError, match="cache.kv_bits: 4 is not possible .* decode quantized: logits"):
            engine_driver.make_real_engine(folders["llama"], kv_bits=4, kv_start=STARTED)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"kv_group_size": 64}, "its heads of 32 values do not divide into groups of 64"),
        ("ragged", {}, "decode ragged: RuntimeError: planted"),
    ],
)
def test_models_that_cannot_be_quantized_are_refused(
    folders: dict[str, Path], monkeypatch: Patch, family: str, options: dict[str, Any], reason: str
) -> None:
    """When they are loaded, with the reason."""
    if family == "ragged":

        def attend(*_: Any, **__: Any) -> mx.array:
            raise RuntimeError("planted")

        monkeypatch.setattr("mlxrun.model.hooks.attention.RaggedKeys.attend", attend)
    with pytest.raises(ConfigError, match=f"cache.kv_bits: 8 is not possible for this model: {reason}"):
        engine_driver.make_real_engine(folders["llama"], kv_bits=8, **options)
