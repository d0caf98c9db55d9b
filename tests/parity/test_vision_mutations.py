"""The twins of test_parity_vision.py: each plants one silent bug, and parity must fail.

`none` is the control: the same requests without a bug pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.model.hooks.tower_blocks import BlockRecorder
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.model_caller import VisionModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs
from tests.helpers import engine_driver, vision_models
from tests.helpers.model_fixtures import Zoo

Patch = pytest.MonkeyPatch


def wraps(monkeypatch: Patch, name: str, make: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(VisionModelCaller, name, make(getattr(VisionModelCaller, name)))


def looks_at_images(monkeypatch: Patch, change: Callable[[PromptInputs], PromptInputs]) -> None:
    """What a prompt with images is made of is changed, once all are encoded."""

    def make(original: Any) -> Any:
        def encode_part(self: Any, inputs: PromptInputs, whole: bool = False) -> PromptInputs:
            found: PromptInputs = original(self, inputs, whole)
            return found if found.pending is not None else change(found)

        return encode_part

    def make_known(original: Any) -> Any:
        def prepare_inputs(self: Any, prompt: Any, media: Any, cached: int = 0) -> PromptInputs:
            found: PromptInputs = original(self, prompt, media, cached)
            return found if media is None or found.pending is not None else change(found)

        return prepare_inputs

    wraps(monkeypatch, "encode_part", make)
    wraps(monkeypatch, "prepare_inputs", make_known)


def none(monkeypatch: Patch) -> None:
    """Nothing."""


def delta_dropped(monkeypatch: Patch) -> None:
    """Answers go on at the position of the last prompt token, images counted by their tokens."""

    looks_at_images(monkeypatch, lambda inputs: replace(inputs, position_delta=0))


def delta_of_another_row(monkeypatch: Patch) -> None:
    """What a delta on the shared module would do."""
    deltas = [0]

    def change(inputs: PromptInputs) -> PromptInputs:
        deltas.append(inputs.position_delta)
        return replace(inputs, position_delta=deltas[-2])

    looks_at_images(monkeypatch, change)


def positions_of_the_first_chunk(monkeypatch: Patch) -> None:
    """Each chunk's positions are sliced from the front."""

    def make(original: Any) -> Any:
        def media(self: Any, inputs: Any, start: int, stop: int) -> Any:
            extra = original(self, inputs, start, stop)
            if "position_ids" in extra:
                extra["position_ids"] = inputs.positions[..., : stop - start]
            return extra

        return media

    wraps(monkeypatch, "slice_inputs", make)


def deepstack_of_the_first_tokens(monkeypatch: Patch) -> None:
    """The mask is sliced by chunk, the features are not: mlx-vlm's own chunks do that."""

    def make(original: Any) -> Any:
        def deepstack(self: Any, inputs: Any, visual: Any, start: int, stop: int) -> Any:
            extra = original(self, inputs, visual, start, stop)
            if extra:
                count = extra["deepstack_visual_embeds"][0].shape[0]
                extra["deepstack_visual_embeds"] = [d[:count] for d in inputs.deepstack]
            return extra

        return deepstack

    wraps(monkeypatch, "_slice_deepstack", make)


def deepstack_of_another_row(monkeypatch: Patch) -> None:
    seen: list[Any] = []

    def change(inputs: PromptInputs) -> PromptInputs:
        seen.append(inputs.deepstack)
        return replace(inputs, deepstack=seen[0])

    looks_at_images(monkeypatch, change)


def a_block_left_out(monkeypatch: Patch) -> None:
    """A part that is computed replaces what comes after it, as if parts were put together wrongly."""
    add = BlockRecorder.add

    def add_and_spoil(self: Any, output: Any) -> None:
        add(self, output)
        output[...] = 0

    monkeypatch.setattr(BlockRecorder, "add", add_and_spoil)


def embeddings_of_another_row(monkeypatch: Patch) -> None:
    """Requests with as many tokens: the first one's image is shown to all."""
    seen: list[Any] = []

    def change(inputs: PromptInputs) -> PromptInputs:
        seen.append(inputs.embeds)
        return replace(inputs, embeds=seen[0])

    looks_at_images(monkeypatch, change)


VISION = [
    *((family, none) for family in vision_models.CORE),
    *((family, delta_dropped) for family in vision_models.MROPE),
    *((family, delta_of_another_row) for family in vision_models.MROPE),
    *((family, positions_of_the_first_chunk) for family in vision_models.MROPE),
    ("qwen3_vl", deepstack_of_the_first_tokens),
    ("qwen3_vl", deepstack_of_another_row),
    *((family, embeddings_of_another_row) for family in vision_models.CORE),
    ("qwen3_vl", a_block_left_out),
]


# Each bug is planted in one family by default, and in the others in the sweep.
CASES = [
    pytest.param(
        *(f, p), marks=() if p is none or f == "qwen3_vl" else pytest.mark.sweep, id=f"{p.__name__}-{f}"
    )
    for f, p in VISION
]


@pytest.mark.parametrize(("family", "plant"), CASES)
def test_images(zoo: Zoo, family: str, plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Two requests of the same shape with different images, and one with another number of image tokens."""
    first, second = vision_models.images(7, 2, size=(32, 32))
    (large,) = vision_models.images(8, 1, size=(64, 48))
    same = vision_models.prompt(family, "what is here ", None, " and here ", None, "?")
    cases = {
        "a": (same, [first, second]),
        "b": (same, [second, first]),
        "c": (vision_models.prompt(family, "x", None), [large]),
    }
    if plant is embeddings_of_another_row:
        del cases["c"]
    engine = engine_driver.make_real_engine(zoo.vision(family), ComputeMethods("ragged"))
    plant(monkeypatch)
    requests = [engine_driver.make_vision_request(engine, name, *case) for name, case in cases.items()]
    events = engine_driver.run_requests(engine, requests)
    assert [e.error for e in events.values() if e.error is not None] == []
    different = [
        name
        for name, case in cases.items()
        if engine_driver.has_other_answer(events[name], zoo.see(family, *case))
    ]
    assert bool(different) is (plant is not none)
