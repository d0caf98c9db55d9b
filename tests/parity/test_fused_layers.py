"""Rows that decode with fused layers give the ORACLE's answers, whatever happens to them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxrun.engine.engine import Engine
from mlxrun.model.fused.operations import ArrayOperations
from mlxrun.model.hooks import install
from mlxrun.model.run import compute_methods
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

PROMPTS = text_models.prompts(23, (1, 3, 17, 40, 9, 62))
COUNT, ROWS = 12, 4


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are fused, as on a GPU; what is between products is the library's."""
    engine_driver.use_small_groups(monkeypatch)
    monkeypatch.setattr(install, "uses_gpu", lambda: True)


class CountedOperations(ArrayOperations):
    """`steps`: calls of the gate."""

    steps = 0

    def gate(self, product: mx.array) -> mx.array:
        self.steps += 1
        return super().gate(product)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> CountedOperations:
    counted = CountedOperations()
    monkeypatch.setattr(compute_methods, "choose_operations", lambda: counted)
    return counted


def make_engine(zoo: Zoo, family: str = "llama", width: int = 0, **options: Any) -> Engine:
    methods = ComputeMethods("fused", fixed_width=width)
    return engine_driver.make_real_engine(zoo.text(family), methods, max_running=ROWS, **options)


def list_asks() -> list[TimedRequest]:
    """More than there are rows; some come late."""
    asks = [
        engine_driver.make_text_request(str(i), ids, max_tokens=COUNT - i % 3)
        for i, ids in enumerate(PROMPTS)
    ]
    return [TimedRequest(ask, 3 * i) for i, ask in enumerate(asks)]


@pytest.mark.parametrize("width", [0, ROWS])
@pytest.mark.parametrize("family", mark_sweep(("llama", "qwen3", "phi3", "mistral"), ("llama", "qwen3")))
def test_answers_are_those_of_each_request_alone(
    zoo: Zoo, family: str, width: int, operations: CountedOperations
) -> None:
    engine = make_engine(zoo, family, width)
    events = engine_driver.run_requests(engine, list_asks(), engine_driver.preempt_every(engine, 5))
    for i, ids in enumerate(PROMPTS):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, ids, COUNT - i % 3))
    assert operations.steps > 0 and engine.generation.errors == 0


def test_a_wrong_gate_is_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ArrayOperations):
        def gate(self, product: mx.array) -> mx.array:
            return super().gate(product * 1.1)

    monkeypatch.setattr(compute_methods, "choose_operations", Wrong)
    events = engine_driver.run_requests(make_engine(zoo), list_asks())
    assert all(
        engine_driver.has_other_answer(events[str(i)], zoo.answer("llama", ids, COUNT - i % 3))
        for i, ids in enumerate(PROMPTS)
    )


def test_adapters_keep_the_librarys_layers(zoo: Zoo) -> None:
    """A compiled forward cannot change its adapters, so such models are never fused."""
    config = engine_driver.make_config(zoo.text("llama"), adapters={"one": "folder"})
    assert not install.may_fuse(config)
    assert install.may_fuse(engine_driver.make_config(zoo.text("llama")))
    assert not install.may_fuse(engine_driver.make_config(zoo.text("llama"), load_check=False))


@pytest.mark.parametrize("family", mark_sweep(("pixtral", "idefics3", "smolvlm"), ("pixtral",)))
def test_a_vision_model_sees_with_fused_layers(zoo: Zoo, family: str, operations: CountedOperations) -> None:
    folder = zoo.vision(family)
    engine = engine_driver.make_real_engine(folder, ComputeMethods("fused"), max_running=ROWS)
    images = vision_models.images(3, 1)
    prompt = vision_models.prompt(family, "see ", None, "what?")
    ask = engine_driver.make_vision_request(engine, "a", prompt, images, max_tokens=COUNT)
    events = engine_driver.run_requests(engine, [ask, *list_asks()[:2]])
    engine_driver.check_answer(events["a"], zoo.see(family, prompt, images, COUNT))
    assert operations.steps > 0
