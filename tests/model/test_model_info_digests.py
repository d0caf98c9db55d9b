"""Digests of images and the regions that they are computed for."""

from __future__ import annotations

import pytest
from PIL import Image

from mlxrun.config.settings import ModelSettings
from mlxrun.model.model_info import compute_image_digest, load_model_info
from mlxrun.model.vision.image_units import number_regions
from tests.helpers import vision_models
from tests.helpers.model_fixtures import Zoo

A, B = (vision_models.images(seed, 1)[0] for seed in (21, 22))


@pytest.mark.parametrize("family", vision_models.VISION)
def test_digests_name_pixels(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a span, of decoded pixels; an image keeps its digest beside others."""
    host = load_model_info(ModelSettings(path=str(zoo.vision(family))))

    def digests(*images: Image.Image) -> list[bytes]:
        made = host.process(vision_models.prompt(family, *[None] * len(images)), list(images))
        assert len(made.image_digests) == len(made.image_spans)
        return list(dict.fromkeys(made.image_digests))

    assert digests(A) == digests(A.copy()) == [compute_image_digest(A, host.processor_digest)]
    assert digests(A, B) == [*digests(A), *digests(B)]
    changed = A.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    assert digests(changed) != digests(A)
    assert compute_image_digest(A, b"other settings") != compute_image_digest(A, host.processor_digest)
    assert compute_image_digest(Image.new("RGB", (2, 8))) != compute_image_digest(Image.new("RGB", (8, 2)))


def test_spans_of_one_image() -> None:
    ids = [7, 7, 5, 7, 7, 5, 7, 9, 7, 5, 1, 7]
    spans = [(0, 2), (3, 5), (6, 7), (8, 9), (11, 12)]
    assert number_regions(spans, ids, 5) == [0, 0, 0, 1, 2]
    assert number_regions(spans, ids, None) == [0, 1, 2, 3, 4]
    assert number_regions([], ids, 5) == []
