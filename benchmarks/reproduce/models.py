"""The models: the built-in one, and tiny ones of other architectures, made with random weights in seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prefix_cache.models import HYBRID, PLAIN, VISION, WINDOWED, get_family_config
from mlxrun.cli.bench.models import PRESETS, find_folder, write_chat_model

EMBEDDED, QUANTIZED, BFLOAT16 = "embedded", "4-bit", "bfloat16"
_WINDOW = 24  # tokens; prompts are longer, so that the window matters


@dataclass(frozen=True, slots=True)
class ReproduceModel:
    """A model to test. `title`: what the table calls it; `images`: whether its lines have images."""

    name: str
    title: str
    folder: Path
    images: bool = False


# Two layers, one of each kind: a forward costs time by its number of operations, however small they are.
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def _write_plain(folder: Path) -> None:
    write_chat_model(folder, PRESETS["tiny"] | _SMALL)


def _write_windowed(folder: Path) -> None:
    layers = {"sliding_window": _WINDOW, "sliding_window_pattern": 2}
    write_chat_model(folder, get_family_config(WINDOWED) | _SMALL | layers)


def _write_hybrid(folder: Path) -> None:
    write_chat_model(folder, get_family_config(HYBRID) | _SMALL | {"full_attention_interval": 2})


def _write_quantized(folder: Path) -> None:
    write_chat_model(folder, PRESETS["tiny-4bit"] | _SMALL)


def _write_bfloat16(folder: Path) -> None:
    write_chat_model(folder, PRESETS["tiny"] | _SMALL | {"dtype": "bfloat16"})


def _write_vision(folder: Path) -> None:
    """The tiny model that the tests use; they are part of every checkout and source distribution."""
    importlib.import_module("tests.helpers.vision_models").build("qwen3_vl", folder)


_WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    PLAIN: ("plain (Qwen3)", _write_plain),
    WINDOWED: ("windowed (Gemma 3)", _write_windowed),
    HYBRID: ("hybrid (Qwen3-Next)", _write_hybrid),
    VISION: ("vision (Qwen3-VL)", _write_vision),
    QUANTIZED: ("4 bit (Qwen3)", _write_quantized),
    BFLOAT16: ("bfloat16 (Qwen3)", _write_bfloat16),
}
FAMILIES = (EMBEDDED, *_WRITERS)


def make_model(name: str, folder: Path) -> ReproduceModel:
    """Write the model of a family to `folder`."""
    if name == EMBEDDED:
        return ReproduceModel(name, "embedded", find_folder(name))
    title, write = _WRITERS[name]
    write(folder)
    return ReproduceModel(name, title, folder, images=name == VISION)


def open_local_model(path: Path) -> ReproduceModel:
    """A model of the user's, with text prompts; ConfigError if the folder is not that of a model."""
    folder = find_folder(str(path)).resolve()
    return ReproduceModel(folder.name, folder.name, folder)
