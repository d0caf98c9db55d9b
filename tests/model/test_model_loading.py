"""What the load check chose is chosen again at the next start. A refused model is compared each time."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core import cache_home
from mlxrun.model.hooks import quantized_layers, weight_form
from mlxrun.model.hooks.quantized_layers import MethodTable, list_routed
from mlxrun.model.load_check.text_ladder import RefusedModelError
from mlxrun.model.run.model_caller import VisionModelCaller
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.verdict_driver import KeptVerdicts, get_report
from tests.model.hooks.test_weight_form_answers import quantize_folder
from tests.model.load_check.test_choose import all_masks_dropped, ragged_gives_nan

Patch = pytest.MonkeyPatch


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: Patch) -> KeptVerdicts:
    return KeptVerdicts(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def quantized(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize_folder(zoo.text("llama"), tmp_path_factory.mktemp("quantized"))


def answer(engine: Any) -> tuple[int, ...]:
    (prompt,) = text_models.prompts(0, (9,))
    request = engine_driver.make_text_request("a", prompt, max_tokens=8)
    return engine_driver.run_requests(engine, [engine_driver.TimedRequest(request)])["a"].tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_second_start_compares_nothing(zoo: Zoo, verdicts: KeptVerdicts, family: str) -> None:
    first = verdicts.start(zoo.text(family))
    second = verdicts.start(zoo.text(family))
    assert verdicts.compared == 1
    assert (get_report(first).kept, get_report(second).kept) == (False, True)
    assert get_report(first).methods == get_report(second).methods
    assert get_report(first).checks == get_report(second).checks
    assert (first.recheck is None, second.recheck is None) == (True, False)
    assert answer(first) == answer(second)


def test_a_comparison_is_logged_before_it_begins(
    zoo: Zoo, verdicts: KeptVerdicts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    texts = []
    for mode in ("cached", "cached", "always", False):
        caplog.clear()
        verdicts.start(zoo.text("llama"), load_check=mode)
        texts.append([m.partition(" with ")[2] for m in caplog.messages if m.startswith("comparing ")])
    assert texts == [["its library, once for these files and settings"], [], ["its library"], []]


@pytest.mark.parametrize(("mode", "count"), [("always", 2), (True, 2), (False, 0)])
def test_other_modes_keep_nothing(zoo: Zoo, verdicts: KeptVerdicts, mode: Any, count: int) -> None:
    for _ in range(2):
        engine = verdicts.start(zoo.text("llama"), load_check=mode)
        assert engine.recheck is None and not get_report(engine).kept
        assert (len(get_report(engine).checks) > 0) is (count > 0)
    assert verdicts.list_files() == []


def test_nothing_is_kept_for_no_days(zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch) -> None:
    monkeypatch.setattr(cache_home, "KEPT_DAYS", 0)
    for _ in range(2):
        verdicts.start(zoo.text("llama"))
    assert verdicts.compared == 2 and verdicts.list_files() == []


def test_a_fallback_is_kept_with_its_warning(
    zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as inner:
        ragged_gives_nan(inner)
        first = verdicts.start(zoo.text("llama"))
    caplog.clear()
    second = verdicts.start(zoo.text("llama"))
    assert verdicts.compared == 1
    assert get_report(first).methods.decode == get_report(second).methods.decode == "grouped"
    assert "load check: decode ragged is not used for this model" in caplog.text


def test_a_refused_model_is_not_kept(zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch) -> None:
    def refuse(*given: Any) -> None:
        raise RefusedModelError("the model is refused", ())

    with monkeypatch.context() as inner:
        inner.setattr("mlxrun.model.model_loading.choose_methods", refuse)
        with pytest.raises(RefusedModelError):
            verdicts.start(zoo.text("llama"))
    assert verdicts.list_files() == []
    verdicts.start(zoo.text("llama"))
    assert verdicts.compared == 1


def test_another_setting_is_compared(zoo: Zoo, verdicts: KeptVerdicts) -> None:
    for options in ({}, {"prefill_rows": 3}, {"backend": "none"}, {}):
        verdicts.start(zoo.text("llama"), **options)
    assert verdicts.compared == 3


def test_a_damaged_verdict_is_compared_and_replaced(zoo: Zoo, verdicts: KeptVerdicts) -> None:
    verdicts.start(zoo.text("llama"))
    (file,) = verdicts.list_files()
    file.write_bytes(file.read_bytes()[:-9])
    verdicts.start(zoo.text("llama"))
    verdicts.start(zoo.text("llama"))
    assert verdicts.compared == 2


def test_products_are_not_timed_again(quantized: Path, verdicts: KeptVerdicts, monkeypatch: Patch) -> None:
    """So that the next start has the form of weights for which the verdict holds."""
    timed: list[Any] = []

    def time_products(*given: Any) -> dict[str, dict[int, float]]:
        timed.append(given)
        return {"held": {1: 9.0, 32: 9.0}, "library": {1: 1.0, 32: 1.0}}

    monkeypatch.setattr(weight_form, "time_products", time_products)
    forms = [get_report(verdicts.start(quantized)).weights for _ in range(2)]
    assert replace(forms[0], reason="") == replace(forms[1], reason="") and not forms[0].held
    assert forms[0].seconds
    assert (len(timed), verdicts.compared) == (1, 1)
    monkeypatch.setattr(weight_form, "is_held_faster", lambda seconds: True)
    assert get_report(verdicts.start(quantized)).weights.held
    assert verdicts.compared == 2, "of another form nothing was compared"


def test_products_that_differed_stay_the_librarys(
    quantized: Path, verdicts: KeptVerdicts, monkeypatch: Patch
) -> None:
    original = quantized_layers.multiply

    def multiply(layer: Any, x: mx.array, method: Any) -> mx.array:
        return original(layer, x, method) * (1.5 if method == "dequantized" else 1)

    with monkeypatch.context() as inner:
        inner.setattr(quantized_layers, "multiply", multiply)
        first = verdicts.start(quantized, dequantize="never")
    second = verdicts.start(quantized, dequantize="never")
    assert verdicts.compared == 1
    assert [check.passed for check in get_report(second).checks][:1] == [False]
    for engine in (first, second):
        layers = list_routed(engine_driver.get_runner(engine)._caller.model)
        assert layers and all(layer.table == MethodTable() for layer in layers)


def test_images_that_are_refused_stay_refused(
    zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zoo.vision("qwen3_vl")
    with monkeypatch.context() as inner:
        inner.setattr("mlxrun.model.load_check.image_checks.measure_repetition", lambda *given: math.inf)
        first = verdicts.start(folder)
    seen: list[dict[str, str]] = []
    original = VisionModelCaller.follow
    monkeypatch.setattr(
        VisionModelCaller,
        "follow",
        lambda self, *given: (original(self, *given), seen.append(dict(self.refused)))[0],
    )
    second = verdicts.start(folder)
    assert verdicts.compared == 1
    assert get_report(first).refused == get_report(second).refused == seen[0]
    assert seen[0]["images"] and second.model_info.refused_media["images"]


def test_masks_that_are_wrong_at_the_first_start_only(
    zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch
) -> None:
    """They were chosen because of masks that were wrong at the first start only."""
    with monkeypatch.context() as inner:
        all_masks_dropped(inner)
        verdicts.start(zoo.text("llama"))
    second = verdicts.start(zoo.text("llama"))
    (prompt,) = text_models.prompts(0, (9,))
    assert get_report(second).kept and not all(check.passed for check in get_report(second).checks)
    assert list(answer(second)) == list(zoo.answer("llama", prompt).tokens[:8])


def test_a_home_folder_that_is_unknown(zoo: Zoo, verdicts: KeptVerdicts, monkeypatch: Patch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("mlxrun.core.cache_home.find_cache_home", fail)
    logging.getLogger("mlxrun").setLevel(logging.DEBUG)
    assert not get_report(verdicts.start(zoo.text("llama"))).kept


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_known_model_computes_nothing_at_start(
    zoo: Zoo, verdicts: KeptVerdicts, family: str, monkeypatch: Patch
) -> None:
    """Shapes of caches, and so the sums of memory, are the same."""
    first = verdicts.start(zoo.text(family))
    with monkeypatch.context() as inner:
        inner.setattr("mlxrun.model.run.model_caller.mx.isnan", None)
        second = verdicts.start(zoo.text(family))
    assert get_report(second).kept
    memory = [engine.scheduler.limits.memory for engine in (first, second)]
    assert memory[0].footprint == memory[1].footprint and memory[0].weights == memory[1].weights
    assert answer(first) == answer(second)
