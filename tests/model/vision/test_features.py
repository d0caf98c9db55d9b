"""Images that were seen before are not looked at again, and nothing else changes."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import RequestError
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from mlxrun.model.run.model_caller import VisionModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs, split_prompt
from mlxrun.model.vision.features import FeatureCache, ImageFeatures
from mlxrun.model.vision.image_units import ImageUnits, find_regions, split_images
from tests.helpers import vision_models
from tests.helpers.model_fixtures import Zoo

pytestmark = pytest.mark.thorough

MANY = 100_000_000
A, B, C, D = (vision_models.images(seed, 1)[0] for seed in (21, 22, 23, 24))


class Eyes:
    """A model with its processor; `looks` counts how often its vision tower runs."""

    def __init__(self, folder: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        from mlx_vlm import load

        self.host: LoadedModelInfo = load_model_info(ModelSettings(path=str(folder)))
        self.model = load(str(folder))[0]
        self.cold = VisionModelCaller(self.model)
        self.line_break = getattr(self.host.processor, "image_break_token_id", None)
        separate = options.pop("separate", True)
        given = {"image_bytes": MANY, "line_break": self.line_break} | options
        self.caller = VisionModelCaller(self.model, **given)
        self.caller.reset_images(separate=("image", "video") if separate else ())
        self.family = self.host.config["model_type"]
        self.looks = 0
        self._count(monkeypatch)

    def _count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tower = type(getattr(self.model, "vision_tower", None) or self.model.vision_model)
        original = tower.__call__

        def call(module: Any, *args: Any, **options: Any) -> Any:
            self.looks += 1
            return original(module, *args, **options)

        monkeypatch.setattr(tower, "__call__", call)

    def made(self, *parts: str | Image.Image) -> Any:
        images = [part for part in parts if not isinstance(part, str)]
        shown = [part if isinstance(part, str) else None for part in parts]
        return self.host.process(vision_models.prompt(self.family, *shown), images)

    def embed(self, made: Any, caller: VisionModelCaller | None = None) -> PromptInputs:
        """The inputs of a prompt with all its images; without any memory by the caller `cold`."""
        caller = caller or self.caller
        return caller.encode_images(caller.prepare_inputs(made.ids, made.media), len(made.ids))

    def check(self, *parts: str | Image.Image, exact: bool = True) -> int:
        """How often the tower ran for this prompt; what came out is what it is without any memory."""
        made = self.made(*parts)
        self.looks = 0
        found = self.embed(made)
        assert found.pending is None
        looks = self.looks
        wanted = self.embed(made, self.cold)
        assert found.position_delta == wanted.position_delta
        assert equal(found.positions, wanted.positions)
        assert len(found.deepstack) == len(wanted.deepstack)
        for one, other in zip(found.list_arrays(), wanted.list_arrays(), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert mx.abs(one - other).max().item() <= (
                0 if exact else 1e-4 * max(1, mx.abs(other).max().item())
            )
        if wanted.deepstack:
            assert np.array_equal(found.visual_mask, wanted.visual_mask)
        return looks


def equal(one: mx.array | None, other: mx.array | None) -> bool:
    return one is other is None or bool(mx.array_equal(one, other).item())


@pytest.mark.parametrize("family", vision_models.VISION)
def test_the_same_image_is_encoded_once(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = Eyes(zoo.vision(family), monkeypatch)
    assert eyes.check("what is ", A, "?") == 1
    assert eyes.check("another, longer question about ", A, ", please?") == 0
    assert eyes.check(A) == 0
    assert eyes.check("what is ", B, "?") == 1
    assert eyes.check("what is ", A, "?") == eyes.check("is it ", B) == 0
    recoded = A.copy()
    assert eyes.check("and ", recoded) == 0
    changed = A.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    assert eyes.check("what is ", changed, "?") == 1


@pytest.mark.parametrize("family", vision_models.VISION)
def test_a_growing_conversation(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn brings one more image: after the first two turns only that one is looked at."""
    eyes = Eyes(zoo.vision(family), monkeypatch)
    one, two, three, four = (image.resize((32, 32)) for image in (A, B, C, D))
    assert eyes.check("a", one) == 1
    assert eyes.check("a", one, "b", two, "c", exact=False) == 1
    looked: list[Any] = []
    embedder = eyes.caller._images._embedder
    embed_prompt = embedder.embed_prompt
    monkeypatch.setattr(
        embedder,
        "embed_prompt",
        lambda ids, media: looked.append(len(split_images(media).units)) or embed_prompt(ids, media),
    )
    assert eyes.check("a", one, "b", two, "c", three, "d", exact=False) == 1
    assert eyes.check("a", one, "b", two, "c", three, "d", four, exact=False) == 1
    assert looked == [1, 1]
    assert eyes.check("a", one, "b", two, "c", three, "d", four, "!", exact=False) == 0
    assert eyes.check("other", one, "words", two, "and", three, exact=False) == 0


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_exact_sets_only(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = Eyes(zoo.vision(family), monkeypatch, exact_sets_only=True)
    for _ in range(2):
        eyes.check("a", A)
        eyes.check("a", A, "b", B)  # by one call
    assert eyes.check("x", A, "y", B) == eyes.check("x", A) == 0
    assert eyes.check("x", B, "y", A) == eyes.check("x", A, "y", B, "z", C) == 1


def test_a_model_that_mixes_text_into_images_is_found_out(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = Eyes(zoo.vision("gemma3"), monkeypatch)
    original = type(eyes.model).get_input_embeddings

    def mixed(model: Any, ids: mx.array, pixels: Any = None, **options: Any) -> Any:
        made = original(model, ids, pixels, **options)
        if pixels is not None:
            made.inputs_embeds = made.inputs_embeds + 0.01 * ids.sum()
        return made

    monkeypatch.setattr(type(eyes.model), "get_input_embeddings", mixed)
    assert eyes.check("a", A) == eyes.check("b", A) == 1
    assert len(eyes.caller._images.features) == 0


@pytest.mark.parametrize("family", vision_models.VISION)
def test_images_that_lie_in_the_cache_are_not_needed(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that starts after its images computes on without any features, even of images never seen."""
    eyes = Eyes(zoo.vision(family), monkeypatch)
    eyes.check("warm ", B)
    made = eyes.made("look ", A, " and tell me more")
    stop = max(span[1] for span in made.image_spans)
    wanted = eyes.embed(made, eyes.cold)
    logits = []
    for inputs in (wanted, None):
        cache = eyes.cold.make_cache()
        eyes.cold.prefill(mx.array([made.ids[:stop]]), cache, 0, wanted)
        mx.eval(layer_caches.list_all_arrays(cache))
        if inputs is None:
            eyes.looks = 0
            with monkeypatch.context() as patch:
                patch.setattr(ImageUnits, "compute_digests", None)  # nor are their pixels hashed
                inputs = eyes.caller.prepare_inputs(made.ids, made.media, stop)
            assert eyes.looks == 0 and inputs.embeds is None
        logits.append(eyes.caller.prefill(mx.array([made.ids[stop:]]), cache, stop, inputs))
    assert mx.abs(logits[0] - logits[1]).max().item() < 1e-5
    eyes.looks = 0
    inputs = eyes.caller.prepare_inputs(made.ids, made.media, stop - 1)
    assert inputs.ready == 0 and eyes.caller.encode_images(inputs, stop).ready is None and eyes.looks == 1


def make_small() -> list[Image.Image]:
    return [image.resize((32, 32)) for image in (A, B, C, D)]


@pytest.mark.parametrize("family", vision_models.VISION)
def test_images_are_encoded_when_their_tokens_are_due(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first prompt with several images too: each has its turn."""
    eyes = Eyes(zoo.vision(family), monkeypatch)
    one, two, three, four = make_small()
    made = eyes.made("a", one, "b", two, "c", three, "d", four, "e")
    inputs = eyes.caller.prepare_inputs(made.ids, made.media)
    assert inputs.pending is not None and inputs.ready == 0
    runs, (size, looks) = inputs.pending.runs, (len(made.ids), [])
    for stop, next_image in ((1, 1), (runs[1][0], 1), (runs[2][0], 2), (runs[3][0] + 1, None)):
        inputs = eyes.caller.encode_images(inputs, int(stop))
        assert inputs.ready == (None if next_image is None else runs[next_image][0])
        looks.append(eyes.looks)
    assert looks == [1, 1, 2, 4]
    assert inputs.pending is None and eyes.caller.encode_images(inputs, size) is inputs
    wanted = eyes.embed(made, eyes.cold)
    for found, expected in zip(inputs.list_arrays(), wanted.list_arrays(), strict=True):
        assert found.shape == expected.shape
        assert mx.abs(found - expected).max().item() <= 1e-4 * max(1, mx.abs(expected).max().item())


@pytest.mark.parametrize("family", vision_models.VISION)
def test_images_of_a_restored_prefix_are_not_encoded(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that goes on between its images encodes those behind, at their own places."""
    eyes = Eyes(zoo.vision(family), monkeypatch)
    one, two, three, four = make_small()
    eyes.check("warm", one, "up", two, exact=False)
    eyes.caller._images.features.clear()
    made = eyes.made("a", one, "b", two, "c", three, "d", four, "e")
    wanted = eyes.embed(made, eyes.cold)
    runs = wanted_runs(eyes, made)
    start = int(runs[2][0])
    eyes.looks = 0
    inputs = eyes.caller.prepare_inputs(made.ids, made.media, start)
    inputs = eyes.caller.encode_images(inputs, len(made.ids))
    assert eyes.looks == 2
    assert inputs.embeds is not None and wanted.embeds is not None
    assert mx.abs(inputs.embeds[:, start:] - wanted.embeds[:, start:]).max().item() <= 1e-4
    before = sum(len(run) for run in runs[:2])
    for found, expected in zip(inputs.deepstack, wanted.deepstack, strict=True):
        assert found.shape == expected.shape
        assert mx.abs(found[before:] - expected[before:]).max().item() <= 1e-4
    assert mx.abs(inputs.embeds[:, :start] - wanted.embeds[:, :start]).max().item() > 0


def wanted_runs(eyes: Eyes, made: Any) -> Any:
    """The places of each image of a prompt."""
    prompt = split_prompt(
        made.ids, made.media, find_regions(made.ids, eyes.caller.embedder.tokens, made.media)
    )
    assert prompt is not None
    return prompt.split_places()


def test_an_image_that_does_not_fit_its_place_is_encoded_with_the_others(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    eyes = Eyes(zoo.vision("gemma3"), monkeypatch)
    one, two, three, four = make_small()
    made = eyes.made("a", one, "b", two, "c", three, "d", four, "e")
    own = eyes.caller._images
    monkeypatch.setattr(own, "find_features", lambda pending: ImageFeatures(mx.zeros((1, 64)), ()))
    inputs, wanted = eyes.embed(made), eyes.embed(made, eyes.cold)
    assert inputs.pending is None
    assert equal(inputs.embeds, wanted.embeds)


def test_nothing_is_cached_by_default(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = Eyes(zoo.vision("qwen3_vl"), monkeypatch, image_bytes=0)
    assert eyes.check("a", A) == eyes.check("b", A) == 1


def test_the_budget_holds() -> None:
    def seen(rows: int) -> ImageFeatures:
        return ImageFeatures(mx.zeros((rows, 4)), (mx.zeros((rows, 4)),))

    features = FeatureCache(10 * 32)
    for name, rows in ((b"a", 4), (b"b", 4), (b"a", 2), (b"c", 4)):
        features.add([name], seen(rows))
    assert len(features) == 3 and features.currsize == 320
    features.get((b"b",))
    features.add([b"d"], seen(3))
    assert features.get((b"a",)) is None and features.get((b"b",)) is not None
    features.add([b"big"], seen(11))
    assert features.get((b"big",)) is None and features.currsize <= features.maxsize
    assert features.match_prefix([b"b", b"d", b"x", b"c"])[0] == 2


def test_features_pin_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = Eyes(zoo.vision("qwen3_vl"), monkeypatch)
    text = "x" * 2000
    eyes.embed(eyes.made(text, A))
    gc.collect()
    before = mx.get_active_memory()
    eyes.embed(eyes.made(text, B))
    gc.collect()
    assert mx.get_active_memory() - before <= eyes.caller._images.features.currsize + 4096


def test_images_that_the_library_refuses_are_the_requests_fault(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two images of PaliGemma, GOT or Jina VLM: a 400, where clients ask again after a 500."""
    eyes = Eyes(zoo.vision("qwen3_vl"), monkeypatch, separate=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("this model takes one image in a prompt")

    monkeypatch.setattr(type(eyes.model), "get_input_embeddings", refuse)
    with pytest.raises(RequestError, match="^images are refused for this model: this model takes one image"):
        eyes.embed(eyes.made("a", A, B, "b"))
