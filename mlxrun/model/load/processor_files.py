"""The processor of images and videos that a model's folder has, as the library loads it."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_files import read_json
from mlxrun.model.vision.image_units import BOUNDS

log = logging.getLogger(__name__)
# The files with values of an image processor, and the part that has them.
_IMAGE_VALUES = (
    ("preprocessor_config.json", None),
    ("preprocessor_config.json", "media_proc_cfg"),
    ("processor_config.json", "image_processor"),
)
# Arrays of MiniCPM's models that begin with an axis of prompts, and those that no model reads.
_OF_PROMPTS = frozenset(
    ("pixel_values", "tgt_sizes", "audio_feature_lens", "spk_bounds", "num_frames_per_video", *BOUNDS)
)
_OF_IMAGES = frozenset(
    (
        *("image_sizes", "video_sizes", "grids", "grids_videos"),
        *("num_patches_per_image", "num_patches_per_frame"),
    )
)


def load_processor(folder: Path, config: Mapping[str, Any], settings: ModelSettings) -> Any:
    """The library's processor of a vision model. ModelLoadError if the folder's files make none."""
    from mlx_vlm.utils import get_model_and_args, load_image_processor
    from mlx_vlm.utils import load_processor as load_by_library

    for path in sorted(folder.glob("*processor*.json")):
        read_json(path)  # names the file that is wrong, which a library would not
    try:
        get_model_and_args(dict(config))  # the model's module registers its own processor
        processor = load_by_library(
            folder, add_detokenizer=False, trust_remote_code=settings.trust_remote_code
        )
        image_processor = load_image_processor(folder)
    except Exception as error:  # the libraries raise what they like for damaged files
        raise ModelLoadError(f"{folder}: the image processor cannot be loaded: {error}") from error
    if image_processor is not None:
        processor.image_processor = image_processor
    processor = add_image_processor(processor, config)
    if ignored := list(list_ignored(folder, processor)):
        log.warning("%s: mlx-vlm ignores values of its image processor: %s", folder, "; ".join(ignored))
    add_sound_features(processor, config)
    for name in ("image_processor", "video_processor"):
        ignore_text_arguments(getattr(processor, name, None))
    add_whole_images(getattr(processor, "image_processor", None))
    keep_one_start(getattr(processor, "tokenizer", None))
    extractor = getattr(processor, "feature_extractor", None)
    evaluate_arrays(extractor)
    silence_rate_advice(extractor)
    return processor


def list_ignored(folder: Path, processor: Any) -> Iterator[str]:
    """The numbers in a processor's files in whose place the library's image processor has others. Switches
    such as `do_resize` are left out, as the steps of many processors are fixed."""
    images = getattr(processor, "image_processor", None) or processor
    for name, part in _IMAGE_VALUES:
        values = read_json(folder / name)
        own = values if part is None else values.get(part)
        for key, value in own.items() if isinstance(own, dict) else ():
            used = getattr(images, key, value)
            if not key.startswith("do_") and _are_numbers(value, used) and not _is_same(value, used):
                yield f"{name}: {key} is {value}, and {used} is used"


def _are_numbers(*values: Any) -> bool:
    """Whether all are numbers or lists of numbers; true and false are numbers."""
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    return all(isinstance(each, int | float) for each in itertools.chain.from_iterable(lists))


def _is_same(value: Any, used: Any) -> bool:
    """Whether numbers are the same; one number stands for a list of it."""
    if 1 not in (np.size(value), np.size(used)):
        return np.array_equal(value, used)
    return bool(np.all(np.equal(value, used)))


def add_image_processor(processor: Any, config: Mapping[str, Any]) -> Any:
    """The processor of Phi-4 with SigLIP 2, or of Jina VLM. mlx-vlm's needs torchvision for images of the
    former, and remote code for the latter; without them it returns the tokenizer alone. Other processors are
    returned as they are."""
    if config.get("model_type") == "jina_vlm" and not hasattr(processor, "tokenizer"):
        from mlx_vlm.models.jina_vlm import JinaVLMProcessor

        return JinaVLMProcessor(processor)
    is_naflex = "naflex" in str(config.get("mm_vision_tower", "")).lower()
    if config.get("model_type") != "phi4-siglip" or hasattr(processor, "image_processor") or not is_naflex:
        return processor
    from mlx_vlm.models.phi4_siglip.processing_phi4_siglip import Phi4SigLipProcessor
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    images = Siglip2ImageProcessorPil(
        patch_size=(config.get("vision_config") or {}).get("patch_size", 16),
        max_num_patches=config.get("max_num_patches", 3600),
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return Phi4SigLipProcessor(images, processor)


def add_whole_images(component: Any) -> None:
    """Let Llama 4's image processor make the whole image behind its tiles, as transformers' does. mlx-vlm
    makes tokens for its features, and reads them from beyond the end of those of the tiles."""
    kind: type[Any] = type(component)
    if kind.__module__ != "mlx_vlm.models.llama4.processing_llama4":
        return

    def split(self: Any, image: Any, ratio: tuple[int, int]) -> list[Any]:
        tiles: list[Any] = kind._split_into_tiles(self, image, ratio)
        return tiles if len(tiles) == 1 else tiles + kind._split_into_tiles(self, image, (1, 1))

    component.__class__ = type(kind.__name__, (kind,), {"_split_into_tiles": split})


def add_sound_features(processor: Any, config: Mapping[str, Any]) -> None:
    """Give the processor of Nemotron Omni the extractor of its model's features of sounds. In mlx-vlm the
    model has it, and the processor returns samples."""
    values = config.get("sound_config")
    if not hasattr(processor, "audio_sampling_rate") or not isinstance(values, Mapping):
        return
    from mlx_vlm.models.nemotron_h_nano_omni.audio import SoundFeatureExtractor
    from mlx_vlm.models.nemotron_h_nano_omni.config import AudioConfig

    processor.feature_extractor = SoundFeatureExtractor(AudioConfig.from_dict(dict(values)))


def evaluate_arrays(component: Any) -> None:
    """Compute the arrays that a component keeps, such as Inkling's filters. What is pending belongs to this
    thread, and prompts are processed on others."""
    import mlx.core as mx

    kept = vars(component).values() if hasattr(component, "__dict__") else ()
    mx.eval([value for value in kept if isinstance(value, mx.array)])


def silence_rate_advice(extractor: Any) -> None:
    """Drop what transformers logs for each sound that mlx-vlm's processors hand over without its rate. Sounds
    are resampled to the rate of the extractor before."""
    for kind in type(extractor).__mro__:
        logging.getLogger(kind.__module__).addFilter(_is_no_rate_advice)


def _is_no_rate_advice(record: logging.LogRecord) -> bool:
    return "pass the `sampling_rate` argument" not in record.getMessage()


def list_arrays(processor: Any, made: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a processed prompt, as models take them one by one, or a tuple of them where images
    differ in size. Texts and empty arrays are left out. Samples of sounds become features
    (`add_sound_features`)."""
    values = {key: value for key, value in made.items() if value is not None}
    if (clips := values.pop("sound_clips", None)) is not None:
        names = ("input_features", "feature_attention_mask", "audio_feature_lengths")
        values |= zip(names, processor.feature_extractor(clips), strict=True)
    if "image_bound" in values:  # MiniCPM's: of one prompt, without the axis of prompts
        values |= {key: values[key][0] for key in _OF_PROMPTS & values.keys()}
        values = {key: value for key, value in values.items() if key not in _OF_IMAGES}
    arrays = {key: _stack_arrays(value) for key, value in values.items()}
    return {
        key: array
        for key, array in arrays.items()
        if isinstance(array, tuple) or (array.dtype.kind != "U" and array.size)
    }


def _stack_arrays(value: Any) -> np.ndarray[Any, Any] | tuple[np.ndarray[Any, Any], ...]:
    """An array, or a tuple of those of images that differ in size."""
    if isinstance(value, list) and len({np.shape(each) for each in value}) > 1:
        return tuple(map(np.array, value))
    return np.array(value)


def ignore_text_arguments(component: Any) -> None:
    """Let a processor of images or videos leave out arguments for texts that it would refuse.

    Many of mlx-vlm's processors hand `padding`, which is for the tokenizer, to both. transformers' processors
    refuse what their `valid_kwargs` do not name. What has no such list is left alone.
    """
    from transformers.processing_utils import TextKwargs

    known = getattr(component, "valid_kwargs", None)
    if known is None:
        return
    refused = TextKwargs.__annotations__.keys() - known.__annotations__.keys()
    _change_calls(component, lambda args, given: {key: given[key] for key in given if key not in refused})


def keep_one_start(tokenizer: Any) -> None:
    """Let a processor's tokenizer add no token that begins texts to texts that begin with it.

    Many chat templates write it (Gemma 3, Pixtral, Mistral 3). mlx-vlm's processors have it added once more;
    transformers' own do not, nor do prompts without images have two.
    """
    start: str = getattr(tokenizer, "bos_token", None) or ""

    def change(args: Sequence[Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        texts = args[0] if args else given.get("text")
        texts = [texts] if isinstance(texts, str) else texts or [""]
        begins = all(isinstance(text, str) and text.startswith(start) for text in texts)
        return {**given, "add_special_tokens": False} if begins else given

    if start:
        _change_calls(tokenizer, change)


def _change_calls(
    component: Any, change: Callable[[Sequence[Any], Mapping[str, Any]], Mapping[str, Any]]
) -> None:
    """Call a component with other named arguments than those with which it is called."""
    kind: type[Any] = type(component)

    def call(self: Any, *args: Any, **given: Any) -> Any:
        return kind.__call__(self, *args, **change(args, given))

    component.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def digest_processor(folder: Path) -> bytes:
    """A digest of all files that determine how images become pixels."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*processor*.json")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.digest()
