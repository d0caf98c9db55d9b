"""Answers of models with quantized weights are the library's, whatever form those have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest

from mlxrun.model.hooks import quantized_layers, weight_form
from mlxrun.model.hooks.quantized_layers import MethodTable, ProductMethod, list_quantized
from mlxrun.model.hooks.weight_form import EXPERT_TABLES
from tests.helpers import engine_driver, oracle, text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.oracle import Answer


def quantize_folder(source: Path, folder: Path) -> Path:
    """A tiny model in 4 bit, as the library writes it."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    assert "quantization" in json.loads((folder / "config.json").read_text())
    return folder


@pytest.fixture(scope="module")
def quantized(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_folder(zoo.text("llama"), tmp_path_factory.mktemp("quantized"))


PROMPTS = text_models.prompts(5, (3, 17, 40, 41, 90))
CHOICES: dict[str, dict[str, Any]] = {
    "never": {"dequantize": "never"},
    "always": {"dequantize": "always"},
    "auto": {},
    "reproducible": {"reproducible": True, "max_running": 4},
}


@pytest.fixture(scope="module")
def answers(quantized: Path) -> list[Answer]:
    """What the library gives for each prompt alone."""
    return [oracle.text_answer(quantized, prompt, engine_driver.COUNT) for prompt in PROMPTS]


def run(folder: Path, **options: Any) -> Any:
    engine = engine_driver.make_real_engine(folder, **options)
    requests = [engine_driver.make_text_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)]
    return engine, engine_driver.run_requests(engine, requests)


@pytest.mark.parametrize("choice", CHOICES)
def test_answers_are_the_librarys(quantized: Path, answers: list[Answer], choice: str) -> None:
    engine, events = run(quantized, **CHOICES[choice])
    assert engine.load_check.weights.kinds == ("affine 4 bit",)
    for i, answer in enumerate(answers):
        engine_driver.check_answer(events[str(i)], answer)


@pytest.mark.parametrize("method", get_args(ProductMethod))
def test_answers_are_the_librarys_by_every_method(
    quantized: Path, answers: list[Answer], method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_form, "choose_table", lambda *given: MethodTable(((1, method),)))
    engine, events = run(quantized, dequantize="never")
    assert engine.load_check.weights.table.choose(5) == method
    for i, answer in enumerate(answers):
        engine_driver.check_answer(events[str(i)], answer)


def test_the_comparison_sees_a_wrong_product(
    quantized: Path, answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: weights that are dequantized with scales of another group."""
    real = mx.dequantize
    monkeypatch.setattr(
        "mlxrun.model.hooks.quantized_layers.mx.dequantize",
        lambda w, scales, *rest, **options: real(w, mx.roll(scales, 1, axis=-1), *rest, **options),
    )
    _, events = run(quantized, dequantize="always")
    assert any(engine_driver.has_other_answer(events[str(i)], answer) for i, answer in enumerate(answers))


def test_loading_converts_one_weight_at_a_time(quantized: Path) -> None:
    engine = engine_driver.make_real_engine(quantized, dequantize="always")
    assert list_quantized(engine_driver.get_runner(engine)._caller.model) == []


def test_entries_of_another_form_are_not_found(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint names the form that `auto` chose; plain weights have one form."""

    def read_root(folder: Path, **options: Any) -> bytes:
        cache: Any = engine_driver.make_real_engine(folder, **options).prefix_cache
        return bytes(cache._root)

    monkeypatch.setattr(weight_form, "is_held_faster", lambda seconds: True)
    auto = read_root(quantized)
    assert auto == read_root(quantized, dequantize="always") != read_root(quantized, dequantize="never")
    monkeypatch.setattr(weight_form, "is_held_faster", lambda seconds: False)
    assert read_root(quantized) == read_root(quantized, dequantize="never") != auto


# -- experts --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def experts(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts that have biases, 2 of 4 for each token."""
    return quantize_folder(zoo.text("gpt_oss"), tmp_path_factory.mktemp("experts"))


def run_experts(folder: Path, reproducible: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, int]:
    """The events by request, and how often experts were dequantized for a call."""
    made: list[int] = []
    real = quantized_layers.dequantize_weight

    def watch(layer: Any, dtype: mx.Dtype) -> mx.array:
        if layer["weight"].ndim == 3:
            made.append(0)
        return real(layer, dtype)

    monkeypatch.setattr(quantized_layers, "dequantize_weight", watch)
    monkeypatch.setattr(weight_form, "EXPERT_TABLES", {"cpu": EXPERT_TABLES["cuda"]})
    options = {"dequantize": "never", "reproducible": reproducible, "chunk": 64}
    engine, events = run(folder, **options)
    assert engine.load_check.weights.experts is EXPERT_TABLES["cuda"]
    return events, len(made)


@pytest.mark.parametrize("reproducible", [False, True])
def test_experts_that_are_dequantized_for_prompts_give_the_librarys_answers(
    experts: Path, reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, count = run_experts(experts, reproducible, monkeypatch)
    assert count > 0
    for i, prompt in enumerate(PROMPTS):
        answer = oracle.text_answer(experts, prompt, engine_driver.COUNT)
        engine_driver.check_answer(events[str(i)], answer)


def test_the_comparison_sees_wrong_experts(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: tokens are multiplied by the next expert."""
    real = mx.gather_mm
    monkeypatch.setattr(
        "mlxrun.model.hooks.quantized_layers.mx.gather_mm",
        lambda x, weight, **options: real(x, mx.roll(weight, 1, axis=0), **options),
    )
    monkeypatch.setattr("mlxrun.model.load_check.choose.check_products", lambda model: ())  # which finds it
    events, _ = run_experts(experts, False, monkeypatch)
    prompt = PROMPTS[-1]
    answer = oracle.text_answer(experts, prompt, engine_driver.COUNT)
    assert engine_driver.has_other_answer(events[str(len(PROMPTS) - 1)], answer)
