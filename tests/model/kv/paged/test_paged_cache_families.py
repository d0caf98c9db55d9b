"""Families of mlx-vlm whose language models ask a cache how far its rows are, in a compiled forward."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.tiny.random_models import read_vision_info, write_vision_model
from mlxrun.model.kv.paged.paged_cache import PagedCache
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.load.loader import load_caller
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.run.compute_methods import ComputeMethods, DecodeMethod, make_decode_batch
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers.engine_driver import make_config

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v")
PROMPTS = {"a": [3, 1, 4, 1, 5, 9], "b": [2, 6]}
STEPS = 2


@pytest.fixture(params=FAMILIES)
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> ModelCaller:
    folder = tmp_path / "model"
    write_vision_model(request.param, folder)
    config = resolve_config(make_config(folder))
    return load_caller(config, read_vision_info(request.param, folder))


def prefill(caller: ModelCaller, prompt: list[int]) -> JoiningRow:
    cache = caller.make_cache()
    mx.eval(caller.prefill(mx.array([prompt]), cache, 0, TEXT_ONLY))
    return JoiningRow("", len(prompt), cache)


def decode(caller: ModelCaller, method: DecodeMethod) -> mx.array:
    """Logits [steps, rows, V]."""
    batch = make_decode_batch(caller.make_cache(), ComputeMethods(method), compiled_at_once=True)
    rows = [JoiningRow(name, len(ids), prefill(caller, ids).cache) for name, ids in PROMPTS.items()]
    batch.update(set(PROMPTS), rows)
    tokens = mx.array([7, 8])
    found = [batch.forward(caller.decode, tokens, batch.lengths) for _ in range(STEPS)]
    mx.eval(found)
    return mx.stack(found)


def test_their_forwards_are_compiled_and_give_the_same(caller: ModelCaller) -> None:
    """Rows of other lengths are at other positions; each is what the library makes of it alone."""
    found = decode(caller, "compiled")
    assert mx.allclose(found, decode(caller, "paged"), atol=1e-5).item()
    for row, (token, prompt) in enumerate(zip((7, 8), PROMPTS.values(), strict=True)):
        cache = prefill(caller, prompt).cache
        for step in range(STEPS):
            alone = caller.decode(mx.array([[token]]), cache, [len(prompt) + step])
            assert mx.allclose(found[step, row], alone[0, -1], atol=1e-4).item()


def test_without_a_place_in_the_prompt_they_cannot_be_compiled(
    caller: ModelCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: the library then evaluates the rows' positions."""
    monkeypatch.delattr(PagedCache, "_offset")
    with pytest.raises(ValueError, match="eval"):
        decode(caller, "compiled")
