"""Faults of mlx-vlm that mlxrun goes around or refuses, each with a script that shows it.

A script follows PREAMBLE, which makes `load(family)`. It prints `shows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LibraryFault:
    """`families`: where it is; `what` is wrong; `instead`: what mlxrun does; `script`: lines of Python that
    print `shows`."""

    families: tuple[str, ...]
    what: str
    instead: str
    script: str
    shows: str


PREAMBLE = """import tempfile
from pathlib import Path

import mlx.core as mx
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.utils import load_image_processor, load_model, load_processor, prepare_inputs
from PIL import Image

from benchmarks.tiny.random_models import write_vision_model


def load(family):
    folder = Path(tempfile.mkdtemp()) / "model"
    write_vision_model(family, folder)
    return load_model(folder), load_processor(folder, add_detokenizer=False)
"""
_BOTH = """model, _ = load("{family}")
image, video = model.config.image_token_id, model.config.video_token_id
ids, grid, pixels = mx.array([[1, *[image] * 4, *[video] * 4]]), mx.array([[1, 4, 4]]), mx.ones((16, 384))
videos = {{"pixel_values_videos": pixels, "video_grid_thw": grid}}
"""
_PLACED = """model, processor = load("{family}")
made = prepare_inputs(processor, images=[Image.new("RGB", (90, 50))], prompts=["a<image>b"])
ids, pixels = made["input_ids"], made["pixel_values"]
"""

FAULTS = (
    LibraryFault(
        ("llava", "llava_onevision", "granite4_vision", "got", "cohere_compass"),
        "processors hand `padding`, which is for the tokenizer, to image processors that refuse it.",
        "Image processors of transformers are called without arguments for texts that they do not know.",
        """_, processor = load("llava")
try:
    prepare_inputs(processor, images=[Image.new("RGB", (40, 40))], prompts=["a<image>b"])
except ValueError as error:
    print(str(error).partition("error: ")[2])
""",
        "ImagesKwargs.__init__() got an unexpected keyword argument 'padding'",
    ),
    LibraryFault(
        ("gemma3", "pixtral", "mistral3", "llava"),
        "a prompt with images whose chat template writes the token that begins texts begins with two.",
        "The tokenizer of a processor adds none to a text that begins with it, as in transformers.",
        """_, processor = load("gemma3")
text = processor.tokenizer.bos_token + "<start_of_image>"
made = prepare_inputs(processor, images=[Image.new("RGB", (40, 40))], prompts=[text])
print(made["input_ids"][0].tolist().count(processor.tokenizer.bos_token_id))
""",
        "2",
    ),
    LibraryFault(
        ("qwen2_vl", "qwen2_5_vl"),
        "videos beside images are left out, and their tokens keep the embedding of the token.",
        "Images and videos of a prompt are encoded by a call of each kind.",
        _BOTH.format(family="qwen2_5_vl")
        + """made = model.get_input_embeddings(ids, pixels, image_grid_thw=grid, **videos).inputs_embeds
print(mx.array_equal(made[0, 5:], model.language_model.model.embed_tokens(ids)[0, 5:]).item())
""",
        "True",
    ),
    LibraryFault(
        ("qwen3_5", "qwen3_5_moe"),
        "videos beside images are an error, since features of images are counted for the tokens of both.",
        "The calls are two here too.",
        _BOTH.format(family="qwen3_5")
        + """try:
    model.get_input_embeddings(ids, pixels, image_grid_thw=grid, **videos)
except ValueError as error:
    print(error)
""",
        "Image features and image tokens do not match: tokens: 8, features 4",
    ),
    LibraryFault(
        ("llava_next", "granite_vision"),
        "all features of a tile take the place of one token, although the processor makes one of each.",
        "Features are packed as in transformers (the hook `tiles`).",
        _PLACED.format(family="llava_next")
        + """print(ids.shape[1], model.get_input_embeddings(ids, pixels).inputs_embeds.shape[1])
""",
        "54 162",
    ),
    LibraryFault(
        ("deepseek_vl_v2",),
        "the grids of as many images as there are tiles are read, beyond the end of their array.",
        "The array has rows of zeros there (the same hook). A list instead of an array shows the fault.",
        _PLACED.format(family="deepseek_vl_v2")
        + """grids = [list(rows) for rows in made["images_spatial_crop"]]
try:
    model.get_input_embeddings(ids, pixels, grids, made["images_seq_mask"])
except IndexError as error:
    print(error)
""",
        "list index out of range",
    ),
    LibraryFault(
        ("llama4",),
        "an image of several tiles has tokens for the whole image too, but no pixels of it. Their features "
        "are read from beyond the end of an array.",
        "The whole image follows its tiles, as in transformers.",
        """_, processor = load("llama4")
made = prepare_inputs(processor, images=[Image.new("RGB", (90, 50))], prompts=["a<|image|>b"])
tokens = made["input_ids"] == processor.tokenizer.convert_tokens_to_ids("<|patch|>")
print(tokens.sum().item(), len(made["pixel_values"]) * 4)
""",
        "12 8",
    ),
    LibraryFault(
        ("jina_vlm",),
        "without code of the checkpoint the processor is a tokenizer; images are left out without an error.",
        "The processor is mlx-vlm's own.",
        """_, processor = load("jina_vlm")
made = prepare_inputs(processor, images=[Image.new("RGB", (40, 40))], prompts=["a<|image|>b"])
print(sorted(made))
""",
        "['attention_mask', 'input_ids']",
    ),
    LibraryFault(
        ("molmo",),
        "several images of a prompt become prompts of their own, each with all of the text.",
        "More than one image in a prompt is refused.",
        """_, processor = load("molmo")
made = prepare_inputs(processor, images=[Image.new("RGB", (40, 40))] * 2, prompts=["ab"])
print(len(made["input_ids"]))
""",
        "2",
    ),
    LibraryFault(
        ("paddleocr_vl",),
        "two images of different sizes are an error, and two of one size are the frames of one image.",
        "More than one image in a prompt is refused.",
        """_, processor = load("paddleocr_vl")
text = "a<|IMAGE_PLACEHOLDER|>b<|IMAGE_PLACEHOLDER|>"
try:
    prepare_inputs(processor, images=[Image.new("RGB", (40, 40))] * 2, prompts=[text])
except ValueError as error:
    print(str(error).partition("error: ")[2])
""",
        "index 1 is out of bounds for axis 0 with size 1",
    ),
    LibraryFault(
        ("paligemma",),
        "an image behind text loses its last features: tokens get those of their index in the prompt.",
        "The library embeds a prompt that begins with the image (the hook `tiles`).",
        _PLACED.format(family="paligemma")
        + """at = ids.tolist()[0].index(model.config.image_token_index)
made = model.get_input_embeddings(ids, pixels, made["attention_mask"]).inputs_embeds
print(at, mx.abs(made[0, at + 15 : at + 17]).sum(axis=-1).tolist()[0])
""",
        "1 0.0",
    ),
    LibraryFault(
        ("falcon_ocr",),
        "a prompt with an image shifts the positions of the answers to later prompts without one.",
        "Positions come with each call (the hook `positions`).",
        """model, processor = load("falcon_ocr")
language = model.language_model
def answer():
    cache = make_prompt_cache(language)
    language(mx.array([[1, 2, 3]]), cache=cache)
    return language(mx.array([[4]]), cache=cache).logits
before = answer()
made = prepare_inputs(processor, images=[Image.new("RGB", (64, 64))], prompts=["plain"])
ids, pixels, grid = made["input_ids"], made["pixel_values"], made["image_grid_hw"]
seen = model.get_input_embeddings(ids, pixels, image_grid_hw=grid).to_dict()
language(ids, cache=make_prompt_cache(language), **seen)
print(mx.array_equal(before, answer()).item())
""",
        "False",
    ),
    LibraryFault(
        ("mistral_large3",),
        "images are not seen: the language model embeds token ids and leaves out the given embeddings.",
        "It takes them (the hook `embeddings`).",
        """model, _ = load("mistral_large3")
ids, seen = mx.array([[1, 2, 3]]), mx.random.normal((1, 3, 64))
both = [model.language_model(ids, inputs_embeds=embeds).logits for embeds in (seen, 2 - seen)]
print(mx.array_equal(*both).item())
""",
        "True",
    ),
    LibraryFault(
        ("mllama",),
        "in layers that attend to images, the tokens of a text attend to those behind them, without a mask.",
        "The model is refused: a text has other answers by every length of its chunks.",
        """folder = Path(tempfile.mkdtemp()) / "model"
write_vision_model("mllama", folder)
language = load_model(folder).language_model
caches = [make_prompt_cache(language) for _ in range(2)]
texts = zip(([65, 66], [65, 67]), caches)
first = [language(mx.array([text]), cache=cache).logits[0, 0] for text, cache in texts]
print(mx.array_equal(*first).item())
""",
        "False",
    ),
    LibraryFault(
        ("fastvlm",),
        "the text behind a second image begins in front of it, one token too early for each image.",
        "Each image is embedded alone, with the tokens of its features (the hook `placeholders`).",
        """model, _ = load("fastvlm")
ids, pixels = mx.array([[1, -200, 2, -200, 3, 4]]), mx.zeros((2, 3, 64, 64))
made = model.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids)).inputs_embeds
print(mx.array_equal(made[0, 3], model.language_model.model.embed_tokens(ids)[0, 4]).item())
""",
        "True",
    ),
    LibraryFault(
        ("llava_bunny", "multi_modality"),
        "the second image of a prompt has no token, and the text behind it is lost.",
        "More than one image in a prompt is refused.",
        """_, processor = load("llava_bunny")
processor.image_processor = load_image_processor(processor.name_or_path)
images, prompts = [Image.new("RGB", (40, 40))] * 2, ["a<image>b<image>c"]
made = prepare_inputs(processor, images=images, prompts=prompts, image_token_index=-200)
print(made["input_ids"].tolist())
""",
        "[[97, -200, 98, 256]]",
    ),
    LibraryFault(
        ("phi4_siglip",),
        "without torchvision the processor is a tokenizer, and images are left out without an error.",
        "Its image processor is the one of transformers that needs no torchvision.",
        """_, processor = load("phi4_siglip")
made = prepare_inputs(processor, images=[Image.new("RGB", (40, 40))], prompts=["a<image>b"])
print(sorted(made))
""",
        "['attention_mask', 'input_ids']",
    ),
    LibraryFault(
        ("gemma3n",),
        "prompts are embedded without the factor that their tokens have in the language model.",
        "The model is refused, since answers go on with other embeddings than prompts have. With "
        "`model.kind: text`, mlx-lm computes its text.",
        """folder = Path(tempfile.mkdtemp()) / "model"
write_vision_model("gemma3n", folder)
model, ids = load_model(folder), mx.array([[1, 2, 3]])
seen = model.get_input_embeddings(ids).to_dict()
given = {name: value for name, value in seen.items() if value is not None}
both = [model.language_model(ids, **extra).logits for extra in ({}, given)]
print(mx.array_equal(*both).item())
""",
        "False",
    ),
    LibraryFault(
        ("phi4mm",),
        "a prompt with sound changes the weights of all later prompts, if they are apart for sound.",
        "Sound is refused for such a checkpoint. Quantized ones have one set of weights for all.",
        """model, _ = load("phi4mm")
name = "model.layers.0.mlp.down_proj"
shapes = {"base_layer": (64, 96), "lora_A.speech": (1, 96), "lora_B.speech": (64, 1)}
model.sanitize({f"{name}.{part}.weight": mx.ones(shape) for part, shape in shapes.items()})
language, ids = model.language_model, mx.array([[1, 2, 3]])
before = language(ids).logits
sound = {"input_audio_embeds": mx.ones((1, 38, 80)), "audio_embed_sizes": mx.array([5])}
model.get_input_embeddings(mx.array([[model.config.audio_token_index] * 5]), **sound)
print(mx.array_equal(before, language(ids).logits).item())
""",
        "False",
    ),
    LibraryFault(
        ("gemma4",),
        "of several sounds, the padding of a shorter one takes the tokens of the next.",
        "More than one sound in a prompt is refused.",
        """model, _ = load("gemma4")
features, mask = mx.random.normal((2, 64, 128)), mx.ones((2, 64))
mask[0, 32:] = 0  # the first sound has 8 tokens, the second 16
ids = mx.array([[model.config.audio_token_id] * 24])
made = model.get_input_embeddings(ids, input_features=features, input_features_mask=mask).inputs_embeds
print(mx.abs(made[0, 8:16]).max().item())
""",
        "0.0",
    ),
    LibraryFault(
        ("gemma4_unified",),
        "tokens of an image see each other, so a prompt is computed at once, but in chunks beside a sound.",
        "Images and videos beside sound are refused, since their answers depend on the length of chunks.",
        """model, _ = load("gemma4_unified")
image, sound = model.config.image_token_id, model.config.audio_token_id
prompts = [mx.array([[image] * 4]), mx.array([[image] * 4 + [sound]])]
print([model.chunked_prefill_policy(input_ids=ids) for ids in prompts])
""",
        "[False, True]",
    ),
    LibraryFault(
        ("nemotron_h_nano_omni",),
        "features of a video take the tokens of images, and a prompt with both is an error.",
        "Videos beside images or sound are refused.",
        """model, _ = load("nemotron_h_nano_omni")
ids, pixels = mx.array([[model.img_context_token_id] * 4]), mx.ones((1, 3, 32, 32))
try:
    model.get_input_embeddings(ids, pixels, pixel_values_videos=pixels)
except ValueError as error:
    print(error)
""",
        "Use separate requests for Nemotron image and video inputs.",
    ),
    LibraryFault(
        ("inkling",),
        "processors do not say which arrays belong to which image.",
        "Images beside sound are refused, since they are not told apart.",
        """_, processor = load("inkling")
images, prompts = [Image.new("RGB", (40, 40))] * 2, ["<|image_pad|>and<|image_pad|>"]
made = prepare_inputs(processor, images=images, prompts=prompts)
print(sorted(made), len(made["pixel_values"]))
""",
        "['attention_mask', 'input_ids', 'pixel_values'] 4",
    ),
    LibraryFault(
        ("mimo_v2",),
        "sounds are encoded by a model of another library, in a folder beside the weights.",
        "Sound is refused, since nothing compares that model.",
        """_, processor = load("mimo_v2")
print(processor.audio_tokenizer_path.name, processor.audio_tokenizer_path.exists())
""",
        "audio_tokenizer False",
    ),
)


def render_faults() -> Iterator[str]:
    """Lines of docs/models.md about the faults."""
    yield from (
        "",
        "## Faults of mlx-vlm",
        "",
        "mlxrun goes around these, or refuses the model. A script shows each; the comment is what it prints.",
        "The scripts run in a clone of mlxrun, after these lines:",
        "",
        "```python",
        *PREAMBLE.splitlines(),
        "```",
    )
    for fault in FAULTS:
        names = ", ".join(f"`{family}`" for family in fault.families)
        yield from ("", f"In {names}: {fault.what} {fault.instead}", "", "```python")
        yield from (*fault.script.splitlines(), f"# {fault.shows}", "```")
