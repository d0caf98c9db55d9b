"""A model without its weights has the sizes of the loaded one, and no weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.cli.bench.models import PRESETS, write_model
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.fit import outline as module
from mlxrun.model.fit.outline import load_outline, outline_attention, trace_prefill
from mlxrun.model.hooks.engine_attention import use_engine_attention
from mlxrun.model.load.footprint import count_weight_bytes, measure_footprint
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.model_caller import run_trial_forward
from tests.helpers import text_models, vision_models
from tests.helpers.model_fixtures import Zoo, mark_sweep


@pytest.mark.parametrize(
    "family",
    mark_sweep([*text_models.TEXT, *vision_models.VISION], [*text_models.CORE, "deepseek_v3", "qwen3_vl"]),
)
def test_sizes_are_those_of_the_loaded_model(zoo: Zoo, family: str) -> None:
    folder = zoo.text(family) if family in text_models.TEXT else zoo.vision(family)
    config = Config(model=ModelSettings(path=str(folder)))
    info = load_model_info(config.model, weights=True, digest=False)
    made = load_outline(config, info)
    caller = load_caller(config, info)
    cache, vocab = run_trial_forward(caller)
    assert made.weights == made.least == count_weight_bytes(caller.model)
    assert (made.vocab, measure_footprint(made.cache)) == (vocab, measure_footprint(cache))


@pytest.mark.parametrize("form", ["never", "always", "auto"])
def test_quantized_weights_have_the_form_that_is_decided(tmp_path: Path, form: str) -> None:
    """`auto` is measured at load on a CPU, so both forms are possible."""
    write_model(tmp_path, PRESETS["tiny-4bit"], 0)
    model = ModelSettings(path=str(tmp_path), dequantize=form)  # type: ignore[arg-type]
    config = Config(model=model)
    info = load_model_info(model, weights=True, digest=False)
    made = load_outline(config, info)
    loaded = {
        each: count_weight_bytes(
            load_caller(replace(config, model=replace(model, dequantize=each)), info).model
        )  # type: ignore[arg-type]
        for each in ("never", "always")
    }
    assert made.kinds == ("affine 4 bit",)
    if form == "auto":
        assert (made.least, made.weights) == (loaded["never"], loaded["always"])
    else:
        assert made.least == made.weights == loaded[form]


def test_no_weight_is_read(zoo: Zoo) -> None:
    config = Config(model=ModelSettings(path=str(zoo.text("llama"))))
    info = load_model_info(config.model, weights=True, digest=False)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    made = load_outline(config, info)
    trace_prefill(made, 2, 16)
    assert mx.get_peak_memory() - before < made.weights / 10


def test_a_model_that_reads_values_is_named(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model=ModelSettings(path=str(zoo.text("llama"))))
    info = load_model_info(config.model, weights=True, digest=False)
    made = load_outline(config, info)
    weights = made.caller.model.model.norm.weight
    monkeypatch.setattr(nn.RMSNorm, "__call__", lambda self, x: x * x.sum().item())
    with pytest.raises(ModelLoadError, match="its size cannot be known before it is loaded"):
        trace_prefill(made, 1, 4)
    assert made.caller.model.model.norm.weight is weights, "the model has its own parameters again"


def test_attention_in_outline_has_the_shape_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is called in the engine's forwards only."""
    queries, keys, values = mx.zeros((2, 4, 5, 8)), mx.zeros((2, 2, 7, 8)), mx.zeros((2, 2, 7, 6))
    assert outline_attention(queries, keys, values, 1.0, "causal").shape == (2, 4, 5, 6)
    called: list[str] = []
    monkeypatch.setattr(module, "outline_attention", lambda q, *_, **__: called.append("outline") or q)
    from mlxrun.model.hooks.engine_attention import attend_plain

    if mx.default_device() != mx.cpu:
        pytest.skip("GPUs attend by one operation, which is traced as it is")
    with use_engine_attention(on_cpu=module.outline_attention):
        attend_plain(queries, keys, keys, 1.0, None)
    attend_plain(queries, keys, keys, 1.0, None)
    assert called == ["outline"]
