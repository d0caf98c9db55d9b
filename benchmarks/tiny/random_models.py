"""Writes tiny random models of the libraries' families, as folders that the libraries load."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.tiny.byte_tokenizer import (
    EOS,
    TOKEN_ID,
    VOCAB,
    place_specials,
    save_tokenizer,
    write_json,
)
from benchmarks.tiny.processor_files import PROCESSORS, write_processor
from benchmarks.tiny.text_configs import make_text_config
from benchmarks.tiny.vision_configs import make_vision_config
from benchmarks.tiny.vision_families import VISION
from benchmarks.tiny.vision_prompts import TinyVisionInfo
from mlxrun.config.settings import ModelSettings
from mlxrun.model.load.model_digests import stamp_files
from mlxrun.model.load.model_files import read_json
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info

_PARTS = ["text", "vision", "perceiver", "projector", "audio"]
Array = np.ndarray[Any, Any]


def write_text_model(family: str, folder: Path, seed: int = 0) -> None:
    """Config, weights in float32 and a tokenizer. Raises whatever the library's module raises."""
    config = make_text_config(family)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder, seed)
    write_json(folder / "config.json", config)
    save_tokenizer(folder)


def write_vision_model(
    family: str, folder: Path, seed: int = 1, sizes: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """The same for a family of mlx-vlm, with processor files if they are known. Raises what the library
    raises. `sizes`: values of the parts of the config, such as `text_config`."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    shrink_tower(family)
    config = make_vision_config(family, VISION[family])
    for more in (PROCESSORS[family].make_config() if family in PROCESSORS else {}, sizes or {}):
        for key, value in more.items():
            config[key] = {**config[key], **value} if isinstance(config.get(key), dict) else value
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    used = copy.deepcopy(config)
    module, _ = get_model_and_args(config=used)
    settings = update_module_configs(module.ModelConfig.from_dict(used), module, used, _PARTS)
    # mlx-vlm's gemma3 looks for lm_head under a wrong name, so it is always tied.
    save_weights(module.Model(settings), folder, seed, tied=family == "gemma3")
    if family in PROCESSORS:
        write_processor(family, folder)
    else:
        save_tokenizer(folder)


@functools.cache
def shrink_tower(family: str) -> None:
    """Give a tower smaller sizes that are in the library's code, for the rest of the process. Ids of tokens
    are there too."""
    if family == "fastvlm":
        from mlx_vlm.models.fastvlm.config import VisionConfig

        VisionConfig.layers, VisionConfig.embed_dims = [1, 1, 1, 1, 1], [32, 32, 32, 32, 64]
    if family == "gemma3n":
        from mlx_vlm.models.gemma3n import vision

        vision.gemma3n_mobilenet_def = lambda: _list_blocks(vision)
        adapter = vision.MobileNetV5MultiScaleFusionAdapter
        vision.MobileNetV5MultiScaleFusionAdapter = functools.partial(_make_adapter, adapter)
    if family == "hunyuan_vl":
        from mlx_vlm.models.hunyuan_vl.processing_hunyuan_vl import HunYuanVLProcessor

        names = {"IMAGE": "<image>", "IM_START": "<|vision_start|>", "IM_END": "<|vision_end|>"}
        for name, token in (names | {"PAD": "<|endoftext|>"}).items():
            setattr(HunYuanVLProcessor, f"{name}_TOKEN_ID", TOKEN_ID[token])
    if family == "dots_ocr":
        from mlx_vlm.models.dots_ocr.processing_dots_ocr import DotsVLProcessor

        DotsVLProcessor.__setattr__ = _set_dots_token
    if family == "jina_vlm":
        from mlx_vlm.models.jina_vlm.image_processor import ImageProcessor

        ids = place_specials(PROCESSORS[family].specials)
        names = {"patch": "patch", "start": "start", "end": "end", "column": "col"}
        sizes = {"base_input_size": (48, 48), "patch_size": 8, "overlap_margins": (2, 2), "max_pixels": 9000}
        tokens = {f"{name}_token_id": ids[f"<im_{token}>"] for name, token in names.items()}
        init: Any = functools.partialmethod(ImageProcessor.__init__, max_crops=4, **sizes, **tokens)
        ImageProcessor.__init__ = init
    if family == "phi4mm":
        from mlx_vlm.models.phi4mm import processing_phi4mm as processing

        processing.DEFAULT_AUDIO_TOKEN = "<|audio_pad|>"
        processing.AUDIO_TOKEN_INDEX = TOKEN_ID["<|audio_pad|>"]


def _set_dots_token(processor: Any, name: str, value: Any) -> None:
    own = place_specials(PROCESSORS["dots_ocr"].specials)["<|imgpad|>"]
    object.__setattr__(processor, name, own if name == "image_token_id" else value)


def _list_blocks(vision: Any) -> list[list[Any]]:
    """Four stages of gemma3n's tower. The third makes a grid of 16 x 16 of an image of 32 x 32."""
    attention = [vision._mmqa(2, 8, 1), vision._uir(0, 0, 32, 1, 1.0, is_multiscale=True)]
    return [
        [vision._er(3, 16, 1)],
        [vision._uir(3, 5, 16, 1, 2.0)],
        [vision._uir(5, 5, 32, 1, 2.0), *attention],
        [vision._uir(5, 5, 32, 2, 2.0), *attention],
    ]


def _make_adapter(kind: Any, in_chs: Any, out_chs: int, output_resolution: Any) -> Any:
    """What joins the features of its last two stages."""
    return kind(in_chs=[64], out_chs=32, output_resolution=output_resolution)


def read_vision_info(family: str, folder: Path) -> LoadedModelInfo:
    """The info of a vision model of this module. Without processor files, it is that of a text model with the
    same tokenizer, and makes pixels itself."""
    if family in PROCESSORS:
        return load_model_info(ModelSettings(path=str(folder)), weights=True, announce=False)
    text = folder / "text"
    text.mkdir()
    write_json(text / "config.json", make_text_config("llama"))
    save_tokenizer(text)
    found = load_model_info(ModelSettings(path=str(text)))
    own = {part.name: getattr(found, part.name) for part in fields(found) if part.init}
    own |= {"folder": folder, "config": read_json(folder / "config.json"), "vision": True}
    own["stamps"] = stamp_files(ModelSettings(path=str(folder)), folder)  # of what is loaded
    return TinyVisionInfo(**own, family=family)


def save_weights(model: Any, folder: Path, seed: int, ends: bool = False, tied: bool = False) -> None:
    """Draw every parameter anew, by its name and the seed, and save in the library's own names."""
    params = tree_flatten(model.parameters())
    tied = tied or not any(name.endswith("lm_head.weight") for name, _ in params)
    weights = {name: mx.array(_draw(name, np.array(value), seed, tied)) for name, value in params}
    for name in weights:
        if name.endswith("lm_head.weight") or (tied and _is_embedding(name)):
            weights[name] = weights[name] * mx.array(_speakable(ends, 0.25 if tied else 0.0))[:, None]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _draw(name: str, value: np.ndarray, seed: int, tied: bool) -> np.ndarray:
    """embed 1, lm_head 2/sqrt(d), hidden 1.6/sqrt(fan): greedy output varies. 1-D: 0.1 around its value."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if value.dtype == np.uint8:  # BitNet's: four numbers of 0, 1 or 2 in a byte
        return (rng.integers(0, 3, (*value.shape, 4)) << np.array([0, 2, 4, 6])).sum(-1).astype(np.uint8)
    noise = rng.standard_normal(value.shape)
    if name.endswith("A_log"):
        # Slow decay: else a state forgets within 20 tokens, and no test could see that it was lost.
        return np.log(rng.uniform(0.002, 0.05, value.shape)).astype(np.float32)
    if value.ndim < 2:
        # Tied: a strong embedding only repeats its own token, so the layers must speak louder than the input.
        loud = 3.0 if tied and "layernorm.weight" in name and ".post_" in name else 0.0
        # Biases come from the library's random state, which is not ours.
        base = value if np.min(value) == np.max(value) else 0.0
        return (base + loud + 0.1 * noise).astype(np.float32)
    fan = math.prod(value.shape[1:]) if "conv" in name or "patch_embed" in name else value.shape[-1]
    if _is_embedding(name):
        scale = 2 / math.sqrt(value.shape[-1]) if tied else 1.0
    elif name.endswith("lm_head.weight"):
        scale = 2 / math.sqrt(fan)
    else:
        scale = 1.6 / math.sqrt(fan)
    return (scale * noise).astype(np.float32)


def _is_embedding(name: str) -> bool:
    return name.endswith(
        ("embed_tokens.weight", "embeddings.weight", "wte.weight", "backbone.embedding.weight")
    )


def _speakable(ends: bool, rest: float) -> np.ndarray:
    """1 for tokens that may come out (printable ASCII, newline, <|im_end|> if wanted), `rest` for others."""
    keep = np.full(VOCAB, rest, dtype=np.float32)
    keep[[10, *range(32, 127)]] = 1
    if ends:
        keep[EOS] = 1
    return keep
