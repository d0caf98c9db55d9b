"""The processor files of real checkpoints, for tiny models: the same classes and keys, with small sizes.

They take the code path of the checkpoint that is named beside each. Patches have 8 pixels a side, and towers
images of 32 pixels, as the tiny configs have them (vision_configs.py). Some sizes are in the library's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.tiny.byte_tokenizer import save_tokenizer, write_json
from benchmarks.tiny.omni_families import FAMILIES, OmniFamily
from benchmarks.tiny.processor_entry import ProcessorFiles
from benchmarks.tiny.processors_of_mlx_vlm import OF_MLX_VLM
from benchmarks.tiny.processors_of_transformers import OF_TRANSFORMERS


def _make_omni(entry: OmniFamily) -> ProcessorFiles:
    image, video, audio = entry.placeholders
    return ProcessorFiles(
        entry.checkpoint,
        entry.files,
        image,
        entry.processor,
        named=(),
        tokenizer={"extra_special_tokens": entry.list_tokens()},
        others={"video": video, "audio": audio},
        config=entry.make_config(),
    )


PROCESSORS: Mapping[str, ProcessorFiles] = {
    **OF_TRANSFORMERS,
    **OF_MLX_VLM,
    **{family: _make_omni(entry) for family, entry in FAMILIES.items()},
}


def write_processor(family: str, folder: Path) -> None:
    """Write the processor files of a family beside its config and weights, with a tokenizer whose template
    renders its placeholder."""
    files = PROCESSORS[family]
    names = ("preprocessor_config", "processor_config", "video_preprocessor_config")
    for name, content in zip(names, (files.images, files.processor, files.video), strict=True):
        if content:
            write_json(folder / f"{name}.json", content)
    save_tokenizer(folder, files.template, files.specials, **files.tokenizer)
