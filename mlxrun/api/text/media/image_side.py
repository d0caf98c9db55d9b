"""Finds out up to which size the model's processor keeps images as they are."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Mapping

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import render_image_probe

logger = logging.getLogger(__name__)

PROBED_SIDES = (1792, 2560)  # of squares; larger ones would be reduced only if they exceeded media.max_pixels
_lock = threading.Lock()


def find_image_side(model: ModelInfo) -> int | None:
    """Return the side in pixels of the largest square image that the processor does not reduce, or a larger
    number. None if that is unknown, or too large to matter. The first call for a model is slow."""
    with _lock:
        return _measure_side(_Identity(model))


class _Identity:
    """A model as a key of a cache: two models are equal if they are the same object."""

    def __init__(self, model: ModelInfo) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.model is self.model

    def __hash__(self) -> int:
        return id(self.model)


@functools.lru_cache(maxsize=4)
def _measure_side(key: _Identity) -> int | None:
    """Processes two large squares: if the results have the same size, the processor reduced both."""
    from PIL import Image

    text = render_image_probe(key.model)
    if not text:
        return None
    found = []
    for side in PROBED_SIDES:
        try:
            made = key.model.process(text, [Image.new("RGB", (side, side), "gray")])
        except Exception:  # the model's own processor may raise anything
            logger.debug("the processor of images cannot be measured", exc_info=True)
            return None
        # Each pixel is three numbers; 0 if it is not known which they are.
        values = made.media.get("pixel_values") if isinstance(made.media, Mapping) else None
        found.append((int(getattr(values, "size", 0)) // 3, len(made.ids)))
    if found[0] != found[1] or not found[0][0]:
        return None
    return math.isqrt(found[0][0]) + 1
