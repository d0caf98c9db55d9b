"""Prompts whose last chunk samples, as on CUDA, get the ORACLE's answers: cold ones that come one by one,
hits, and rows that were preempted."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from PIL import Image

from mlxrun.engine.engine import Engine
from mlxrun.model.machine.device import CUDA_STEP_COSTS
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.runner import ModelRunner
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo

PROMPTS = text_models.prompts(81, [1, 2, 9, 30, 17, 40, 9])
# Steps before which they come: by themselves, while another one is computed or decodes, and two at once.
COMES = (0, 1, 6, 9, 10, 10, 20)
RED = Image.new("RGB", (48, 48), "red")
FAMILIES = ("llama", "deepseek_v3")  # others stop where the prefix cache does, and never sample in chunks


@pytest.fixture(autouse=True)
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that sampled in a chunk, of engines that plan their steps as on CUDA."""
    engine_driver.use_small_groups(monkeypatch)
    monkeypatch.setattr("mlxrun.engine.build.choose_step_costs", lambda config: CUDA_STEP_COSTS)
    ids: list[str] = []
    sample = ModelRunner.sample_rows

    def sample_rows(runner: ModelRunner, batches: Any) -> Any:
        ids.extend(batch.ids[0] for batch in batches if not batch.decodes)
        return sample(runner, batches)

    monkeypatch.setattr(ModelRunner, "sample_rows", sample_rows)
    return ids


def make_engine(zoo: Zoo, family: str) -> Engine:
    methods = ComputeMethods("paged", PrefillSharing(4, 16, merge_chunks=True), launch_first=True)
    return engine_driver.make_real_engine(zoo.text(family), methods)


def make_requests(**params: Any) -> list[TimedRequest]:
    return [
        TimedRequest(engine_driver.make_text_request(str(i), ids, **params), step)
        for i, (ids, step) in enumerate(zip(PROMPTS, COMES, strict=True))
    ]


@pytest.mark.parametrize("preempted", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_come_by_themselves(zoo: Zoo, family: str, preempted: int, sampled: list[str]) -> None:
    engine = make_engine(zoo, family)
    each = engine_driver.preempt_every(engine, preempted)
    events = engine_driver.run_requests(engine, make_requests(), each)
    for i, ids in enumerate(PROMPTS):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, ids))
    if not preempted:
        # Two at once may share a forward instead.
        assert sampled == ["0", "1", "2", "3", "6"]
        again = engine_driver.run_requests(engine, [request.request for request in make_requests()])
        for i, ids in enumerate(PROMPTS):
            engine_driver.check_answer(again[str(i)], zoo.answer(family, ids))


def test_an_image_prompt_that_comes_by_itself(zoo: Zoo, sampled: list[str]) -> None:
    family = "qwen3_vl"
    engine = engine_driver.make_real_engine(zoo.vision(family))
    for name, parts in {"text": ["just text"], "end": ["what is ", None], "start": [None, "?"]}.items():
        given = vision_models.prompt(family, *parts), [RED] * parts.count(None)
        request = engine_driver.make_vision_request(engine, name, *given, max_tokens=6)
        events = engine_driver.run_requests(engine, [request])
        engine_driver.check_answer(events[name], zoo.see(family, *given, count=6))
    assert sampled == ["text", "end", "start"]


@pytest.mark.parametrize("mistake", ["logits", "newest"])
def test_a_mistake_is_found(zoo: Zoo, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of other tokens; a row that continues from another token than it sampled."""
    sample = ModelRunner.sample_rows

    def sample_rows(runner: ModelRunner, batches: Any) -> Any:
        own = [batch for batch in batches if not batch.decodes]
        for batch in own:
            batch.logits = mx.roll(batch.logits, mistake == "logits", axis=-1)
        found = sample(runner, batches)
        for batch in own:
            row = runner._rows[batch.ids[0]]
            row.newest_token = row.newest_token + (mistake == "newest")
        return found

    monkeypatch.setattr(ModelRunner, "sample_rows", sample_rows)
    events = engine_driver.run_requests(make_engine(zoo, "llama"), make_requests())
    assert engine_driver.has_other_answer(events["3"], zoo.answer("llama", PROMPTS[3]))
