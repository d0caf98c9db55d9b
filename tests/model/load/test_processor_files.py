"""Images become the pixels and tokens that the library's own processor makes of the same files.

Each family has the processor files of a real checkpoint (benchmarks/tiny/processor_files.py). The library
reads the picture's file itself, and mlxrun decodes its bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.tiny import omni_models
from benchmarks.tiny.processor_files import PROCESSORS
from benchmarks.tiny.random_models import read_vision_info, write_vision_model
from benchmarks.tiny.vision_families import VISION
from mlxrun.api.text.media.image_decoding import decode_image
from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import MediaError
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load.processor_files import (
    add_image_processor,
    add_whole_images,
    ignore_text_arguments,
    keep_one_start,
    list_ignored,
)
from mlxrun.model.vision.placeholders import find_placeholder
from tests.helpers.model_fixtures import Zoo, mark_sweep

Arrays = Mapping[str, np.ndarray]
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")  # of gemma4's own files too
ORIENTATION = 0x0112  # EXIF's tag
AUDIO = "audio_features"
OF_IMAGES = ("image_sizes", "video_sizes", "grids", "grids_videos")
OF_IMAGES += ("num_patches_per_image", "num_patches_per_frame")


def make_pixels(width: int, height: int) -> np.ndarray:
    return np.random.default_rng([5, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_pictures(folder: Path) -> dict[str, Path]:
    """Files of many kinds, by name."""
    rotated = Image.Exif()
    rotated[ORIENTATION] = 6
    rgb = {name: Image.fromarray(make_pixels(*size)) for name, size in SIZES.items()}
    made: dict[str, tuple[Image.Image, str, dict[str, Any]]] = {
        **{name: (image, "png", {}) for name, image in rgb.items()},
        "jpeg": (rgb["wide"], "jpeg", {}),
        "turned by EXIF": (rgb["tall"], "jpeg", {"exif": rotated}),
        "palette": (rgb["wide"].quantize(16), "png", {}),
        "grey": (rgb["tall"].convert("L"), "png", {}),
        "black and white": (rgb["wide"].convert("1"), "png", {}),
        "opaque alpha": (rgb["wide"].convert("RGBA"), "png", {}),
        "four inks": (rgb["tall"].convert("CMYK"), "jpeg", {}),
    }
    for name, (image, kind, options) in made.items():
        image.save(folder / f"{name}.{kind}", **options)
    return {name: folder / f"{name}.{kind}" for name, (_, kind, _) in made.items()}


SIZES = {"wide": (90, 50), "tall": (20, 100), "tiny": (9, 9), "square": (64, 64)}
CASES = [
    *([name] for name in ("wide", "tall", "tiny", "square", "jpeg", "turned by EXIF", "palette", "grey")),
    *(["black and white"], ["opaque alpha"], ["four inks"], ["wide", "tall"], ["tiny", "square", "wide"]),
]


class Family:
    """A tiny model of a family, pictures, and what is made of them."""

    def __init__(self, family: str, root: Path) -> None:
        self.name, self.files = family, PROCESSORS[family]
        self.folder = root / "model"
        write_vision_model(family, self.folder)
        self.info = read_vision_info(family, self.folder)
        self.pictures = write_pictures(root)

    def render(self, names: Sequence[str]) -> str:
        return "see " + " and ".join([self.files.placeholder] * len(names)) + " now"

    def process(self, names: Sequence[str]) -> Arrays:
        """The arrays that mlxrun makes, with the ids of the tokens."""
        images = [decode_image(self.pictures[name].read_bytes()) for name in names]
        made = self.info.process(self.render(names), images)
        return {"input_ids": np.array([made.ids]), **made.media}

    def prepare_by_library(self, names: Sequence[str]) -> Arrays:
        """The same by a processor that the library has loaded anew, with a token for each feature."""
        from mlx_vlm.utils import load_image_processor, load_processor, prepare_inputs

        given = {"images": [str(self.pictures[name]) for name in names], "prompts": [self.render(names)]}
        processor = load_processor(self.folder, add_detokenizer=False)
        if (images := load_image_processor(self.folder)) is not None:
            processor.image_processor = images
        processor = add_image_processor(processor, self.info.config)  # which the library may not find
        add_whole_images(getattr(processor, "image_processor", None))  # which the library leaves out
        single = find_placeholder(self.info.config)
        if type(processor).__name__ == "LlavaProcessor":  # mlx-vlm's hands `padding` to its image processor
            made = process_by_transformers(processor, self.files.processor or {}, **given)
        else:
            made = prepare_inputs(processor, image_token_index=single and single.token, **given)
        values = {key: made[key] for key in made if key not in ("attention_mask", "labels")}
        if "image_bound" in values:  # MiniCPM's, of a list of prompts, with arrays that no model reads
            nested = values.keys() - {"input_ids", "mm_token_type_ids", AUDIO}
            values |= {key: values[key][0] for key in nested}
            values = {key: value for key, value in values.items() if key not in OF_IMAGES}
        arrays = {key: join_images(value) for key, value in values.items() if value is not None}
        if single is not None:
            arrays["input_ids"] = np.array([single.expand(arrays["input_ids"][0].tolist(), arrays)])
        return {key: array for key, array in arrays.items() if array.dtype.kind != "U" and array.size}


def process_by_transformers(
    processor: Any, settings: Mapping[str, Any], images: Sequence[str], prompts: Sequence[str]
) -> Any:
    """What transformers' own processor of LLaVA makes."""
    from mlx_vlm.utils import load_image
    from transformers.models.llava.processing_llava import LlavaProcessor

    own = {key: settings[key] for key in settings if key != "processor_class"}
    own_processor = LlavaProcessor(processor.image_processor, processor.tokenizer, **own)
    return own_processor(images=[load_image(image) for image in images], text=prompts[0], return_tensors="np")


def join_images(value: Any) -> np.ndarray:
    """An array of the numbers of images; of those that differ in size, one behind the other."""
    if isinstance(value, (list, tuple)) and len({np.shape(each) for each in value}) > 1:
        return np.concatenate([np.ravel(each) for each in value])
    return np.array(value)


def list_differences(found: Arrays, expected: Arrays) -> list[str]:
    """The names of arrays that differ by a bit."""
    names = sorted(found.keys() | expected.keys())
    both = found.keys() & expected.keys()
    return [n for n in names if n not in both or not same(join_images(found[n]), expected[n])]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b))


SLOW = pytest.param("phi4_siglip", marks=pytest.mark.sweep)


# phi4_siglip takes most of a minute: its processor fills each image up to thousands of patches.
@pytest.mark.parametrize("family", [f for f in PROCESSORS if f != "phi4_siglip"] + [SLOW])
def test_pixels_and_tokens_are_the_librarys(tmp_path: Path, family: str) -> None:
    made = Family(family, tmp_path)
    cases = [case for case in CASES if len(case) == 1 or VISION[family].most > 1]
    expected = {str(case): made.prepare_by_library(case) for case in cases}
    whole = [case for case in cases if np.all(expected[str(case)].get("image_grid_hws", 1))]
    different = {str(case): list_differences(made.process(case), expected[str(case)]) for case in whole}
    assert len(whole) == (6 if family == "kimi_vl" else len(cases))  # see the test of images without a patch
    assert {case: names for case, names in different.items() if names} == {}
    assert made.info.process(made.render(["wide"]), [Image.fromarray(make_pixels(90, 50))]).image_spans


def shift_mean(values: dict[str, Any]) -> None:
    for key in values:
        if key in ("image_mean", "norm_mean", "mean"):
            values[key] = [value + 0.01 for value in values[key]]
        elif key in PARTS and isinstance(values[key], dict):
            shift_mean(values[key])


# Values from which the size of images or of tiles follows.
SIZE_KEYS = (
    *("size", "crop_size", "image_size", "max_image_size", "tile_size", "candidate_resolutions"),
    *("min_pixels", "max_pixels", "max_num_patches", "spatial_patch_size", "max_soft_tokens"),
    *("scale_resolution", "max_slice_nums"),
    *("in_token_limit", "in_patch_limit", "max_image_tokens", "base_image_input_size"),
)
PARTS = ("image_processor", "media_proc_cfg")  # of processor files


def halve_sizes(values: dict[str, Any]) -> None:
    """Of images and of tiles."""
    for key in values:
        if key in SIZE_KEYS:
            values[key] = halve(values[key])
        elif key in PARTS and isinstance(values[key], dict):
            halve_sizes(values[key])


def halve(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: halve(size) for name, size in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(halve, value))
    return value and value // 2


def turn_tiles(processor: Any) -> None:
    """The tiles of an image, or the patches of a tile, come in another order."""
    kind = type(processor)
    calls: list[str] = []  # that run now: only the outer one turns

    def turn(method: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **given: Any) -> Any:
            calls.append(method)
            made = getattr(kind, method)(self, *args, **given)
            calls.pop()
            return made if calls else flip(made)

        return call

    methods = [method for method in ("__call__", "preprocess") if hasattr(kind, method)]
    processor.__class__ = type(kind.__name__, (kind,), {method: turn(method) for method in methods})


def flip(made: Any) -> Any:
    if isinstance(made, (list, tuple)):  # an image each, of processors that return plain lists
        return [np.flip(np.array(each), -2).copy() for each in made]
    key = "pixel_values" if "pixel_values" in made else "images"
    pixels = np.array(made[key])
    made[key] = np.flip(pixels, 1 if pixels.ndim == 5 else -2).copy()
    return made


# What the library has in its code, whatever files say.
FIXED = (
    *((family, shift_mean) for family in ("internvl", "internvl_chat", "falcon_ocr", "minicpmo")),
    *(("jina_vlm", shift_mean), ("jina_vlm", halve_sizes)),
    # Limits far above these pictures.
    *((f, halve_sizes) for f in ("kimi_vl", "kimi_k25", "kimi_k3", "glm5_next", "locateanything", "inkling")),
)
PLANTED = ("llava", "llava_onevision", "gemma3", "idefics3", "pixtral", "qwen3_vl")
UNCHANGED = ("gemma4", "gemma4_unified")  # their image processors are made without the files' values
UNTURNED = (  # whose pixels are no one array of tiles
    *(*UNCHANGED, "minicpmo", "minicpmv4_6", "minicpmv4_7", "inkling", "molmo", "jina_vlm"),
)


def try_differences(made: Family, expected: Arrays) -> list[str]:
    """The arrays that differ; the pixels, if the processor refuses the picture."""
    try:
        return list_differences(made.process(["wide"]), expected)
    except MediaError:
        return ["pixel_values"]


def change_files(made: Family, change: Callable[[dict[str, Any]], None]) -> bool:
    """Change the files of the processor, and read them again; whether they have what is to be changed."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = made.folder / name
        before = file.read_text() if file.exists() else "{}"
        values = json.loads(before)
        change(values)
        if values != json.loads(before):
            file.write_text(json.dumps(values))
            made.info = read_vision_info(made.name, made.folder)
            return True
    return False


@pytest.mark.parametrize("family", mark_sweep([f for f in PROCESSORS if f not in UNCHANGED], PLANTED))
@pytest.mark.parametrize("change", [shift_mean, halve_sizes])
def test_a_wrong_parameter_is_found(
    tmp_path: Path, family: str, change: Callable[[dict[str, Any]], None]
) -> None:
    """The mutation twin: mlxrun reads another number than the library."""
    if (family, change) in FIXED:
        pytest.skip("it is in the library's code")
    made = Family(family, tmp_path)
    expected = made.prepare_by_library(["wide"])
    found: list[str] = []
    if change_files(made, change):
        found = try_differences(made, expected)
    if "pixel_values" not in found:  # the library's processor does not read it from files
        processor = made.info.processor
        change(vars(getattr(processor, "image_processor", None) or processor))
        found = try_differences(made, expected)
    assert "pixel_values" in found or (family, found) == ("falcon_ocr", ["image_grid_hw", "input_ids"])


@pytest.mark.parametrize("family", mark_sweep([f for f in PROCESSORS if f not in UNTURNED], PLANTED))
def test_another_order_of_tiles_is_found(tmp_path: Path, family: str) -> None:
    made = Family(family, tmp_path)
    processor = made.info.processor
    turn_tiles(getattr(processor, "image_processor", None) or processor)
    assert list_differences(made.process(["wide"]), made.prepare_by_library(["wide"])) == ["pixel_values"]


def test_pixels_of_llava_are_those_of_its_files(tmp_path: Path) -> None:
    """Not by a library's processor: the shortest side is 32 pixels, the middle is cut out and normalized."""
    made = Family("llava", tmp_path)
    image = Image.fromarray(make_pixels(64, 32)).resize((64, 32), Image.Resampling.BICUBIC)
    middle = np.array(image.crop((16, 0, 48, 32)), dtype=np.float64) / 255
    expected = (middle - made.files.images["image_mean"]) / made.files.images["image_std"]
    pixels = made.info.process("<image>", [Image.fromarray(make_pixels(64, 32))]).media["pixel_values"]
    assert np.abs(pixels[0] - expected.transpose(2, 0, 1)).max() < 1e-5


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("kimi_vl", ["image_mean", "image_std", "in_token_limit", "pad_input", "patch_size"]),
        ("molmo2", ["max_crops", "overlap_margins", "patch_size"]),
        ("glm5_next", ["image_mean", "image_std", "max_image_tokens", "min_image_tokens", "patch_size"]),
        ("kimi_k3", ["in_patch_limit", "patch_size"]),
        ("llava", []),
        ("kimi_k25", []),  # it takes [2, 2] where its file has 2
    ],
)
def test_values_that_the_library_ignores_are_named(
    tmp_path: Path, family: str, keys: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = Family(family, tmp_path)
    found = list(list_ignored(made.folder, made.info.processor))
    assert sorted(each.split()[1] for each in found) == keys
    warned = [each for each in caplog.messages if "mlx-vlm ignores" in each]
    assert len(warned) == bool(keys) and all(each in warned[0] for each in found)


class Strict:
    """A processor that refuses what `valid_kwargs` does not name."""

    def __init__(self, known: type | None) -> None:
        if known is not None:
            self.valid_kwargs = known

    def __call__(self, images: Any, **given: Any) -> dict[str, Any]:
        return given


def test_only_arguments_for_texts_are_left_out() -> None:
    """What is unknown to both is refused as before, and what the processor knows is handed on."""
    from transformers.processing_utils import ImagesKwargs

    processor = Strict(ImagesKwargs)
    ignore_text_arguments(processor)
    given = {"padding": True, "max_length": 9, "do_pad": True, "return_tensors": "np", "other": 1}
    assert processor(None, **given) == {"do_pad": True, "return_tensors": "np", "other": 1}
    assert type(processor).__name__ == "Strict" and isinstance(processor, Strict)


def test_a_processor_without_a_list_of_arguments_is_left_alone() -> None:
    processor = Strict(None)
    ignore_text_arguments(processor)
    assert type(processor) is Strict and processor(None, padding=True) == {"padding": True}
    ignore_text_arguments(None)


STARTED = [family for family, files in PROCESSORS.items() if "bos_token" in files.tokenizer]


@pytest.mark.parametrize("family", sorted({*STARTED} - {"paligemma", "deepseek_vl_v2"}))
def test_a_prompt_begins_once(tmp_path: Path, family: str) -> None:
    """Whether the chat template writes the token that begins texts or not; two families' never do. With it,
    all but the image is as in a prompt without images."""
    made = Family(family, tmp_path)
    tokenizer, image = made.info.tokenizer, Image.fromarray(make_pixels(40, 40))
    start, rest = tokenizer.bos_token, made.render(["wide"])
    prompts = [made.info.process(text, [image]) for text in (start + rest, rest)]
    assert prompts[0].ids == prompts[1].ids and prompts[0].ids.count(tokenizer.bos_token_id) == 1
    before = tokenizer.encode(f"{start}see ", add_special_tokens=False)
    assert list(prompts[0].ids[: len(before)]) == before


def test_a_tokenizer_without_a_first_token_is_left_alone() -> None:
    class Tokenizer:
        bos_token = None

    tokenizer = Tokenizer()
    keep_one_start(tokenizer)
    assert type(tokenizer) is Tokenizer
    keep_one_start(None)


def test_the_families_that_most_people_run_have_files() -> None:
    wanted = {"llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm"}
    assert wanted | {"pixtral", "mistral3", "internvl", "paligemma"} <= PROCESSORS.keys()


def test_sounds_are_processed_without_advice_in_the_log(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    info = load_model_info(ModelSettings(path=str(zoo.omni("qwen3_omni_moe"))))
    text, *media = omni_models.render("qwen3_omni_moe", ["a", omni_models.make_audio(1)])
    log = logging.getLogger("transformers")
    caplog.set_level(logging.WARNING, log.name)
    log.addHandler(caplog.handler)
    try:
        assert info.process(text, *media).ids
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.messages


def test_images_that_become_prompts_of_their_own_are_refused(tmp_path: Path) -> None:
    """Molmo's. Their tokens would be one prompt with all texts twice."""
    made = Family("molmo", tmp_path)
    with pytest.raises(MediaError, match="2 prompts of 2 images: this model takes one image"):
        made.process(["tiny", "tiny"])


def test_an_image_without_a_patch_is_refused(tmp_path: Path) -> None:
    """Kimi-VL cuts images to whole patches. A smaller one would be left out without a word."""
    made = Family("kimi_vl", tmp_path)
    for case in (["tiny"], ["wide", "tiny"]):
        with pytest.raises(MediaError, match="too small for this model"):
            made.process(case)


def test_llama_4_has_pixels_for_each_of_its_tokens(tmp_path: Path) -> None:
    """Those of the tiles, and of the whole image behind them, which the library leaves out."""
    made = Family("llama4", tmp_path)
    found = made.process(["wide"])
    tokens = found["input_ids"] == made.info.config["image_token_index"]
    assert tokens.sum() == 4 * len(found["pixel_values"]) == 12
    whole = made.process(["square"])["pixel_values"]
    assert len(whole) == 1 and found["pixel_values"][-1].shape == whole[0].shape
