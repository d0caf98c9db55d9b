"""A kept verdict is compared again while the engine is idle, gives way to requests, and says what differs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from mlxrun.engine.engine import Engine
from mlxrun.model.hooks.quantized_layers import list_modules, list_routed
from mlxrun.model.load_check import recheck
from mlxrun.model.load_check.text_ladder import RefusedModelError
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller
from tests.helpers import engine_driver
from tests.helpers.model_fixtures import Zoo
from tests.helpers.verdict_driver import KeptVerdicts, get_report
from tests.model.hooks.test_weight_form_answers import quantize_folder
from tests.model.load_check.test_choose import ragged_gives_nan, ragged_queries_of_the_first_group, right

Patch = pytest.MonkeyPatch


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: Patch) -> KeptVerdicts:
    return KeptVerdicts(tmp_path / "cache", monkeypatch)


def restart(verdicts: KeptVerdicts, folder: Path, **options: Any) -> Engine:
    """An engine that uses the verdict of one before it."""
    verdicts.start(folder, **options)
    engine = verdicts.start(folder, **options)
    assert get_report(engine).kept and verdicts.compared == 1
    return engine


def never() -> bool:
    return False


def describe_state(engine: Engine) -> Any:
    """What the checks change meanwhile: classes, methods, attention, images."""
    caller = engine_driver.get_runner(engine)._caller
    state: list[Any] = [type(module) for module in list_modules(caller.model)]
    state += [layer.table for layer in list_routed(caller.model)]
    state += [id(array) for _, array in tree_flatten(caller.model.parameters())]
    state += [caller.attention, dict(vars(caller))]
    if isinstance(caller, VisionModelCaller):
        state += [dict(caller.refused), id(caller._images)]
    return state


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_right_verdict_is_renewed(zoo: Zoo, verdicts: KeptVerdicts, family: str) -> None:
    engine = restart(verdicts, zoo.text(family))
    before, state = get_report(engine), describe_state(engine)
    engine.check_again(never)
    after = get_report(engine)
    assert verdicts.compared == 2 and engine.recheck is None
    assert not after.kept and after.compared > before.compared and after.surprise == ""
    assert (after.methods, after.hooks, after.weights) == (before.methods, before.hooks, before.weights)
    assert describe_state(engine) == state
    right(zoo, family, engine)
    third = verdicts.start(zoo.text(family))
    assert get_report(third).compared == after.compared
    engine.check_again(never)
    assert verdicts.compared == 2, "once"


def test_it_is_done_after_requests_too(zoo: Zoo, verdicts: KeptVerdicts) -> None:
    engine = restart(verdicts, zoo.text("qwen3_next"))
    right(zoo, "qwen3_next", engine)
    engine.check_again(never)
    right(zoo, "qwen3_next", engine)
    assert not get_report(engine).kept and not get_report(engine).surprise


def test_a_vision_model(zoo: Zoo, verdicts: KeptVerdicts) -> None:
    engine = restart(verdicts, zoo.vision("qwen3_vl"))
    state = describe_state(engine)
    engine.check_again(never)
    assert not get_report(engine).kept and not get_report(engine).surprise
    assert describe_state(engine) == state


@pytest.mark.parametrize("stop", [1, 5, 14, 30])
def test_it_gives_way_at_any_place(tmp_path: Path, zoo: Zoo, verdicts: KeptVerdicts, stop: int) -> None:
    """And leaves no trace in the model, in half precision and with quantized layers."""
    folder = quantize_folder(zoo.text("llama"), tmp_path / "model")
    engine = restart(verdicts, folder, dtype="bfloat16", dequantize="never")
    assert engine.recheck is not None
    state, calls, delay = describe_state(engine), 0, engine.recheck.delay

    def is_wanted() -> bool:
        nonlocal calls
        calls += 1
        return calls >= stop

    engine.check_again(is_wanted)
    assert calls == stop and get_report(engine).kept and engine.recheck.delay == 2 * delay
    assert describe_state(engine) == state
    engine.check_again(never)
    assert not get_report(engine).kept and not get_report(engine).surprise


def test_the_delay_has_a_limit(zoo: Zoo, verdicts: KeptVerdicts) -> None:
    engine = restart(verdicts, zoo.text("llama"))
    assert engine.recheck is not None
    for _ in range(20):
        engine.check_again(lambda: True)
    assert engine.recheck.delay == recheck.MOST_IDLE_SECONDS and verdicts.compared == 1


def test_it_waits_for_memory(zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch) -> None:
    engine = restart(verdicts, zoo.text("llama"))
    with monkeypatch.context() as inner:
        inner.setattr(recheck, "get_memory_limit", lambda given: recheck.read_active())
        engine.check_again(never)
        assert get_report(engine).peak > 0 and verdicts.compared == 1 and engine.recheck is not None
    engine.check_again(never)
    assert verdicts.compared == 2


# -- surprises ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [ragged_gives_nan, ragged_queries_of_the_first_group])
def test_a_difference_is_a_surprise(
    zoo: Zoo, verdicts: KeptVerdicts, plant: Any, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = restart(verdicts, zoo.text("llama"))
    with monkeypatch.context() as inner:
        plant(inner)
        engine.check_again(never)
    assert verdicts.compared == 3, "it is confirmed"
    assert get_report(engine).surprise.startswith("decode ragged")
    assert [r.levelno for r in caplog.records if "verdict" in r.getMessage()] == [logging.ERROR]
    assert verdicts.list_files() == [] and engine.recheck is None
    assert not get_report(verdicts.start(zoo.text("llama"))).kept


def test_a_model_that_is_refused_now_is_a_surprise(
    zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch
) -> None:
    engine = restart(verdicts, zoo.text("llama"))

    def refuse(*given: Any) -> Any:
        raise RefusedModelError("the model is refused", ())

    monkeypatch.setattr("mlxrun.model.model_loading.choose_methods", refuse)
    engine.check_again(never)
    assert get_report(engine).surprise == "RefusedModelError: the model is refused"
    assert verdicts.list_files() == []


def test_what_differs_once_only_is_none(zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch) -> None:
    """Such as a device that was out of memory."""
    engine = restart(verdicts, zoo.text("llama"))
    original, calls = ModelCaller.decode, []

    def decode(self: ModelCaller, *given: Any) -> Any:
        calls.append(1)
        if len(calls) < 4:
            raise RuntimeError("out of memory")
        return original(self, *given)

    monkeypatch.setattr(ModelCaller, "decode", decode)
    engine.check_again(never)
    assert verdicts.compared == 3
    assert get_report(engine).surprise == "" and not get_report(engine).kept
    assert len(verdicts.list_files()) == 1


def test_wrong_products_stay_a_surprise(
    tmp_path: Path, zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch
) -> None:
    """The check gives them up: what confirms it must not compare the library with itself."""
    from mlxrun.model.hooks import quantized_layers

    folder = quantize_folder(zoo.text("llama"), tmp_path / "model")
    engine = restart(verdicts, folder, dequantize="never")
    original = quantized_layers.multiply

    def multiply(layer: Any, x: Any, method: Any) -> Any:
        return original(layer, x, method) * (1.5 if method == "dequantized" else 1)

    monkeypatch.setattr(quantized_layers, "multiply", multiply)
    engine.check_again(never)
    assert get_report(engine).surprise.startswith("products of quantized weights")


def test_images_that_are_refused_now_are_a_surprise(
    zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch
) -> None:
    engine = restart(verdicts, zoo.vision("qwen3_vl"))
    monkeypatch.setattr("mlxrun.model.load_check.image_checks.measure_repetition", lambda *given: 1.0)
    engine.check_again(never)
    assert "image again" in get_report(engine).surprise


def test_faster_methods_that_pass_now_are_for_the_next_start(
    zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as inner:
        ragged_gives_nan(inner)
        verdicts.start(zoo.text("llama"))
    engine = verdicts.start(zoo.text("llama"))
    engine.check_again(never)
    assert get_report(engine).methods.decode == "grouped" and not get_report(engine).surprise
    assert "faster methods pass now" in caplog.text
    right(zoo, "llama", engine)
    assert get_report(verdicts.start(zoo.text("llama"))).methods.decode == "ragged"
