"""The processor files of one checkpoint, and values that many checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tiny.byte_tokenizer import CHATML, TOKEN_ID, place_specials
from benchmarks.tiny.vision_media import PATCH, SIDE

CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
STEPS = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}
SQUARE = {"height": SIDE, "width": SIDE}
SHORTEST = {"do_center_crop": True, "crop_size": SQUARE, "size": {"shortest_edge": SIDE}, "resample": 3}
SIZES = {"patch_size": PATCH, "merge_size": 2}
PIXELS = {"min_pixels": SIDE * SIDE // 4, "max_pixels": 4 * SIDE * SIDE}
EDGES = {"size": {"shortest_edge": SIDE * SIDE // 4, "longest_edge": 4 * SIDE * SIDE}}
GLM = {
    **CLIP,
    **EDGES,
    **SIZES,
    "image_processor_type": "Glm4vImageProcessor",
    "processor_class": "Glm4vProcessor",
    "do_rescale": True,
    "temporal_patch_size": 2,
}
WRAPPED = "<|vision_start|><|image_pad|><|vision_end|>"
BEGINS = {"bos_token": "<|unused_0|>"}  # not the token that pads, which Gemma embeds as zeros


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """`checkpoint`: whose files these are. `images`: preprocessor_config.json; `processor`:
    processor_config.json; `video`: video_preprocessor_config.json. `placeholder`: of an image in rendered
    text; `others`: of other media, by kind. `token`: of a feature, in the keys of the config that are
    `named`; `start`: the token before an image by which the library finds it; `specials`: tokens that only
    this family has. `tokenizer`: values of its config; `config`: values of the model's, by part."""

    checkpoint: str
    images: Mapping[str, Any] | None
    placeholder: str
    processor: Mapping[str, Any] | None = None
    video: Mapping[str, Any] | None = None
    token: str = "<image>"
    start: str | None = None
    named: tuple[str, ...] = ("image_token_id", "image_token_index")
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    specials: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The chat template, which renders the placeholders."""
        more = [f"{{% elif p.type == '{kind}' %}}{text}" for kind, text in self.others.items()]
        parts = "".join([*more, "{% else %}{{ p.text }}"])
        return CHATML.replace("IMAGE", self.placeholder).replace("{% else %}{{ p.text }}", parts)

    def make_config(self) -> dict[str, Any]:
        """The values of the model's config that fit the processor, by part."""
        ids = TOKEN_ID | place_specials(self.specials)
        start = {} if self.start is None else {"vision_start_token_id": ids[self.start]}
        return {**dict.fromkeys(self.named, ids[self.token]), **start, **self.config}
