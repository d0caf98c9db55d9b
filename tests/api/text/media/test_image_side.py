"""How large an image a processor keeps, found out by processing two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlxrun.api.text.media.image_side import PROBED_SIDES, find_image_side
from mlxrun.config.settings import ModelSettings
from mlxrun.core.request import ProcessedPrompt
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.model_fixtures import Zoo
from tests.helpers.tokenizers import TEXT_ONLY, FakeModelInfo
from tests.helpers.vision_models import VISION


class Keeping(FakeModelInfo):
    """Reduces images to squares of at most `side`."""

    side = 100

    def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        self.calls.append(text)
        side = min(self.side, images[0].width)
        return ProcessedPrompt((1,) * side, (), {"pixel_values": np.zeros((1, 3, side, side))})


def test_a_processor_that_reduces_both_squares() -> None:
    model = Keeping(vision=True)
    assert find_image_side(model) == 101
    assert len(model.calls) == 2 and find_image_side(model) == 101 and len(model.calls) == 2


def test_what_cannot_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that keep a square, fail, or return something else; models without images."""
    monkeypatch.setattr(Keeping, "side", PROBED_SIDES[0] + 1)
    assert find_image_side(Keeping(vision=True)) is None

    class Failing(FakeModelInfo):
        def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
            raise RuntimeError("too large")

    assert find_image_side(Failing(vision=True)) is None
    assert find_image_side(FakeModelInfo(vision=True)) is None
    assert find_image_side(FakeModelInfo(vision=True, chat_template=TEXT_ONLY)) is None
    assert find_image_side(FakeModelInfo()) is None


@pytest.mark.parametrize("family", VISION)
def test_real_processors(zoo: Zoo, family: str) -> None:
    """The tiny ones keep 32 x 32 or 64 x 64 pixels; some of them write each twice."""
    model = load_model_info(ModelSettings(path=str(zoo.vision(family))))
    side = find_image_side(model)
    assert side is not None and 32 <= side <= 64 * math.sqrt(2) + 1


def test_the_embedded_model() -> None:
    """At most 128 x 128 pixels, as its preprocessor_config.json says."""
    side = find_image_side(load_model_info(ModelSettings()))
    assert side is not None and 128 <= side <= 128 * math.sqrt(2) + 1
