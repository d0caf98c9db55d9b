"""Writes tiny random models of the libraries' families, as folders that the libraries load."""

from __future__ import annotations

import copy
import importlib
from dataclasses import fields
from pathlib import Path

from mlxrun.config.settings import ModelSettings
from mlxrun.model.load.model_files import read_json
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.tiny.byte_tokenizer import save_tokenizer, write_json
from mlxrun.model.tiny.text_configs import make_text_config
from mlxrun.model.tiny.vision_configs import make_vision_config
from mlxrun.model.tiny.vision_families import VISION
from mlxrun.model.tiny.vision_prompts import TinyVisionInfo
from mlxrun.model.tiny.weights import save_weights

_PARTS = ["text", "vision", "perceiver", "projector", "audio"]


def write_text_model(family: str, folder: Path, seed: int = 0) -> None:
    """Config, weights in float32 and a tokenizer. Raises whatever the library's module raises."""
    config = make_text_config(family)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder, seed)
    write_json(folder / "config.json", config)
    save_tokenizer(folder)


def write_vision_model(family: str, folder: Path, seed: int = 1) -> None:
    """The same for a family of mlx-vlm; there is no image processor. Raises what the library raises."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = make_vision_config(family, VISION[family])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    used = copy.deepcopy(config)
    module, _ = get_model_and_args(config=used)
    settings = update_module_configs(module.ModelConfig.from_dict(used), module, used, _PARTS)
    # mlx-vlm's gemma3 looks for lm_head under a wrong name, so it is always tied.
    save_weights(module.Model(settings), folder, seed, tied=family == "gemma3")
    save_tokenizer(folder)


def read_vision_info(family: str, folder: Path) -> TinyVisionInfo:
    """The info of a vision model that was written without an image processor: that of a text model with the
    same tokenizer."""
    text = folder / "text"
    text.mkdir()
    write_json(text / "config.json", make_text_config("llama"))
    save_tokenizer(text)
    found = load_model_info(ModelSettings(path=str(text)))
    own = {part.name: getattr(found, part.name) for part in fields(found) if part.init}
    own |= {"folder": folder, "config": read_json(folder / "config.json"), "vision": True}
    return TinyVisionInfo(**own, family=family)
