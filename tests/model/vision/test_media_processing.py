"""Digests of images and the regions that they are computed for."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mlxrun.config.settings import ModelSettings
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.vision.image_units import MediaTokens, find_regions
from mlxrun.model.vision.media_processing import compute_image_digest
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
    by_line = find_regions(ids, MediaTokens(7, line_break=5), {})
    assert [list(region.spans) for region in by_line] == [spans[:3], spans[3:4], spans[4:]]
    alone = find_regions(ids, MediaTokens(7), {})
    assert [list(region.spans) for region in alone] == [[span] for span in spans]
    assert find_regions(ids, MediaTokens(None), {}) == []


def test_spans_of_videos() -> None:
    """A video's tokens are shares of all as its grid says; an image of the same prompt is no part of it."""
    ids = [8, 8, 1, 8, 8, 7, 7, 8, 8, 8, 8]
    grid = {"video_grid_thw": np.array([[2, 2, 2], [1, 4, 2]])}
    found = find_regions(ids, MediaTokens(7, 8, line_break=1), grid)
    assert [(region.kind, region.spans) for region in found] == [
        ("video", ((0, 2), (3, 5))),
        ("image", ((5, 7),)),
        ("video", ((7, 11),)),
    ]
    uneven = {"video_grid_thw": np.array([[3, 2, 2], [1, 2, 2]])}
    assert len(find_regions(ids, MediaTokens(7, 8), uneven)) == 4
