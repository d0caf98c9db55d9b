"""A call of a vision tower in parts has the bits of the library's own single call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm import load

from mlxrun.config.settings import ModelSettings
from mlxrun.model.hooks.tower_blocks import BlockRecorder, find_recorder, hook_blocks
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.model_caller import VisionModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs
from tests.helpers import vision_models
from tests.helpers.model_fixtures import Zoo, mark_sweep

MANY = 100_000_000
EVERY = mark_sweep(vision_models.VISION, ("qwen3_vl", "gemma3", "pixtral"))


def count_operations(array: mx.array, folder: Path) -> int:
    """How many operations are left to compute."""
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), array)
    return path.read_text().count("shape=rectangle")


class Tower:
    """A tiny model with the hook, and a prompt with three images."""

    def __init__(self, folder: Path, family: str) -> None:
        info = load_model_info(ModelSettings(path=str(folder)))
        self.model: Any = load(str(folder))[0]
        self._line_break = getattr(info.processor, "image_break_token_id", None)
        text = vision_models.prompt(family, "a", None, "b", None, "c", None)
        self.prompt = info.process(text, vision_models.images(21, 3))
        self.caller = self.make_caller()
        self.wanted = self.caller.embedder.embed_prompt(self.prompt.ids, self.prompt.media)
        mx.eval(self.wanted.list_arrays())
        self.places = hook_blocks(self.model)

    def make_caller(self, separate: bool = False) -> VisionModelCaller:
        caller = VisionModelCaller(self.model, image_bytes=MANY, line_break=self._line_break)
        caller.reset_images(separate=("image",) if separate else ())
        return caller

    def encode(self, caller: VisionModelCaller) -> list[PromptInputs]:
        """The inputs after each part."""
        steps = [caller.prepare_inputs(self.prompt.ids, self.prompt.media)]
        while steps[-1].pending is not None:
            steps.append(caller.encode_part(steps[-1]))
        return steps[1:]

    def count_left(self, caller: VisionModelCaller, folder: Path) -> list[int]:
        """How many blocks have operations left after each part but the last."""
        inputs, left = caller.encode_part(caller.prepare_inputs(self.prompt.ids, self.prompt.media)), []
        while inputs.pending is not None:
            blocks = inputs.pending.blocks
            left.append(sum(count_operations(block, folder) > 0 for block in blocks))
            inputs = caller.encode_part(inputs)
        return left


@pytest.mark.parametrize("family", EVERY)
def test_parts_have_the_bits_of_one_call(zoo: Zoo, family: str, tmp_path: Path) -> None:
    """All images by one call: each step computes one block, and nothing before its turn."""
    tower = Tower(zoo.vision(family), family)
    steps = tower.encode(tower.make_caller())
    assert len(steps) == tower.places >= 2
    assert tower.count_left(tower.make_caller(), tmp_path) == list(reversed(range(tower.places - 1)))
    for found, wanted in zip(steps[-1].list_arrays(), tower.wanted.list_arrays(), strict=True):
        assert found.dtype == wanted.dtype and mx.array_equal(found, wanted).item()
    assert [step.ready for step in steps] == [0] * (len(steps) - 1) + [None]


@pytest.mark.parametrize("family", EVERY)
def test_each_image_has_its_own_parts(zoo: Zoo, family: str) -> None:
    """Images that a tower encodes independently: a call each, with the bits of the call for that image."""
    tower = Tower(zoo.vision(family), family)
    steps = tower.encode(tower.make_caller(separate=True))
    assert len(steps) == 3 * tower.places
    runs = [start for start, _ in tower.prompt.image_spans]
    starts = sorted({step.ready for step in steps if step.ready})
    assert set(starts) <= set(runs) and len(starts) == 2
    whole = tower.make_caller(separate=True)
    at_once = whole.encode_images(whole.prepare_inputs(tower.prompt.ids, tower.prompt.media), 1 << 30)
    for found, other in zip(steps[-1].list_arrays(), at_once.list_arrays(), strict=True):
        assert mx.array_equal(found, other).item()


def test_a_block_that_is_computed_at_once_is_seen(zoo: Zoo, tmp_path: Path, monkeypatch: Any) -> None:
    """The twin: were blocks computed as they are recorded, the first test would fail."""
    add = BlockRecorder.add
    monkeypatch.setattr(BlockRecorder, "add", lambda self, output: mx.eval(output) or add(self, output))
    tower = Tower(zoo.vision("qwen3_vl"), "qwen3_vl")
    assert set(tower.count_left(tower.make_caller(), tmp_path)) == {0}


def test_the_hook_is_for_towers_and_is_installed_once(zoo: Zoo) -> None:
    tower = Tower(zoo.vision("gemma3"), "gemma3")
    assert hook_blocks(tower.model) == tower.places
    recorder = find_recorder(tower.model)
    assert recorder is not None
    with recorder.record() as outputs:
        mx.eval(tower.model.language_model(mx.array([[1, 2]])).logits)
    assert outputs == []
