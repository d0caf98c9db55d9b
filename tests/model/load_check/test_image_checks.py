"""Each mutation of how images are computed is found by the check of that name; what replaces it is exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.gemma3.vision import VisionModel as Gemma3Tower
from mlx_vlm.models.idefics3.idefics3 import Model as Idefics3
from mlx_vlm.models.qwen3_vl.vision import VisionModel as Qwen3Tower

from mlxrun.core.errors import MediaError
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check import image_checks
from mlxrun.model.run.model_caller import VisionModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs
from mlxrun.model.vision import features
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.features import ImageFeatures, ImagePromptEmbedder
from tests.helpers import engine_driver, vision_models
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo, mark_sweep

Patch = pytest.MonkeyPatch
SPLIT = "image chunks, encoded by one call"


def drop_deltas(monkeypatch: Patch) -> None:
    original = Embedder.read_positions
    monkeypatch.setattr(Embedder, "read_positions", lambda *given: (original(*given)[0], 0))


def drop_deltas_after_a_hit(monkeypatch: Patch) -> None:
    original = ImagePromptEmbedder.needs_no_image

    def embed_text(self: Any, prompt: Any) -> Any:
        return image_checks.PromptInputs()

    monkeypatch.setattr(ImagePromptEmbedder, "embed_text", embed_text)
    monkeypatch.setattr(ImagePromptEmbedder, "needs_no_image", original)


def swap_features(monkeypatch: Patch) -> None:
    """The images of a prompt that is assembled change places."""

    def concatenate(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        arrays = zip(*(part.list_arrays() for part in reversed(parts)), strict=True)
        embeddings, *deepstack = (mx.concatenate(array) for array in arrays)
        return ImageFeatures(embeddings, tuple(deepstack))

    monkeypatch.setattr(ImageFeatures, "concatenate", staticmethod(concatenate))


def misplace_features(monkeypatch: Patch) -> None:
    """The tokens of an image that comes after another change places."""
    original = features.insert_features

    def insert_features(inputs: PromptInputs, run: Any, own: ImageFeatures) -> PromptInputs:
        return original(inputs, run[::-1].copy(), own)

    monkeypatch.setattr(features, "insert_features", insert_features)


def shift_chunks(monkeypatch: Patch) -> None:
    """A chunk after the first takes what belongs to the token before."""
    original = VisionModelCaller.slice_inputs

    def slice_inputs(self: Any, inputs: Any, start: int, stop: int) -> dict[str, Any]:
        return original(self, inputs, start - bool(start), stop - bool(start))

    monkeypatch.setattr(VisionModelCaller, "slice_inputs", slice_inputs)


def break_decode_positions(monkeypatch: Patch) -> None:
    """All rows of a batch decode at the positions of the first one's kind: text."""
    original = VisionModelCaller.decode

    def decode(self: Any, ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
        if len(positions) > 1:
            positions = [positions[0]] * len(positions)
        return original(self, ids, cache, positions)

    monkeypatch.setattr(VisionModelCaller, "decode", decode)


def mix_images(monkeypatch: Patch) -> None:
    """What a tower makes of an image depends on the others in its call."""
    for tower in (Qwen3Tower, Gemma3Tower):
        plain = tower.__call__

        def mixed(self: Any, pixels: mx.array, *rest: Any, plain: Any = plain, **given: Any) -> Any:
            return plain(self, pixels + pixels.sum() * 1e-3, *rest, **given)

        monkeypatch.setattr(tower, "__call__", mixed)


Case = tuple[str, Callable[[Patch], None], str]
MUTATIONS: list[Case] = [
    ("qwen3_vl", drop_deltas, "image chunks"),
    ("qwen2_5_vl", drop_deltas, "image chunks"),
    ("qwen3_5", drop_deltas, "image chunks"),
    ("qwen3_vl", drop_deltas_after_a_hit, "image features"),
    *((family, swap_features, "image features") for family in vision_models.VISION),
    *((family, misplace_features, "image chunks") for family in vision_models.VISION),
    *((family, shift_chunks, "image chunks") for family in vision_models.VISION),
]


@pytest.mark.parametrize(
    ("family", "plant", "name"),
    mark_sweep(MUTATIONS, [case for case in MUTATIONS if case[0] in ("qwen3_vl", "gemma3")]),
)
def test_mutations_are_found(
    zoo: Zoo, family: str, plant: Callable[[Patch], None], name: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    report = probe_model(zoo.vision(family))
    assert list_failed(report)[0] == name
    found = {check.name: check for check in report.checks}
    assert found[name].instead == "all images of a prompt are encoded by one call, each time"


@pytest.mark.parametrize("family", mark_sweep(vision_models.VISION, vision_models.CORE))
def test_sound_models_pass_and_keep_no_images(zoo: Zoo, family: str) -> None:
    engine = engine_driver.make_real_engine(zoo.vision(family))
    assert (
        engine.load_check is not None
        and list_failed(engine.load_check) == []
        and engine.load_check.images == ""
    )
    names = {check.name for check in engine.load_check.checks}
    assert {"image chunks", "image features", "image among text"} <= names
    assert len(engine_driver.get_runner(engine)._caller._images.features) == 0


def test_positions_of_rows_in_a_batch(zoo: Zoo, monkeypatch: Patch) -> None:
    """The text rows are found first: they have different lengths."""
    break_decode_positions(monkeypatch)
    report = probe_model(zoo.vision("qwen3_vl"))
    assert "decode ragged" in list_failed(report) and report.methods.decode == "row_by_row"


def test_deltas_of_other_rows_in_a_batch(zoo: Zoo, monkeypatch: Patch) -> None:
    """Rows that decode among others lose their delta, which only a row with images has."""
    original = VisionModelCaller.decode

    def decode(self: Any, ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
        if len(positions) > 1:
            positions = [int(n) for n in next(layer.offset for layer in cache).tolist()]
        return original(self, ids, cache, positions)

    monkeypatch.setattr(VisionModelCaller, "decode", decode)
    report = probe_model(zoo.vision("qwen3_vl"))
    assert list_failed(report) == ["image among text"] and report.methods.decode == "row_by_row"


def test_swapped_features_are_not_used(zoo: Zoo, monkeypatch: Patch) -> None:
    """The twin of the load check's finding: answers are right although features would be wrong."""
    swap_features(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.vision("gemma3"))
    images = vision_models.images(3, 2)
    prompt = vision_models.prompt("gemma3", "a", None, "b", None)
    for name in ("first", "again"):
        ask = engine_driver.make_vision_request(engine, name, prompt, images, max_tokens=6)
        events = engine_driver.run_requests(engine, [ask])
        engine_driver.check_answer(events[name], zoo.see("gemma3", prompt, images), 6)


def test_what_has_no_exact_way_is_refused_by_name(
    zoo: Zoo, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """Positions are wrong however the prompt is computed: images are refused, text is answered."""
    drop_deltas(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.vision("qwen3_vl"))
    report = engine.load_check
    assert report is not None and report.images.startswith("refused: they are computed differently")
    assert list_failed(report) == ["image chunks", SPLIT, "image prefix", "image whole"]
    prompt = vision_models.prompt("qwen3_vl", "a", None)
    ask = engine_driver.make_vision_request(engine, "seen", prompt, vision_models.images(3, 1), max_tokens=4)
    text = engine_driver.make_vision_request(engine, "text", vision_models.prompt("qwen3_vl", "a"))
    events = engine_driver.run_requests(engine, [ask, text])
    assert str(events["seen"].error).startswith("images are refused for this model: they are computed")
    engine_driver.check_answer(events["text"], zoo.see("qwen3_vl", vision_models.prompt("qwen3_vl", "a")))
    assert "image whole is not used for this model" in caplog.text


@pytest.mark.parametrize(("family", "mixes"), [("qwen3_vl", False), ("qwen3_vl", True), ("gemma3", True)])
def test_images_that_a_tower_mixes_are_encoded_by_one_call(
    zoo: Zoo, family: str, mixes: bool, monkeypatch: Patch
) -> None:
    if mixes:
        mix_images(monkeypatch)
    report = probe_model(zoo.vision(family))
    assert list_failed(report) == (["image alone"] if mixes else [])
    assert report.separate == (() if mixes else ("image",)) and report.features_cached


def test_chunks_that_end_at_images_may_be_wrong(zoo: Zoo, monkeypatch: Patch) -> None:
    """Whole prompts are right: they are split as the library does."""
    shift_chunks(monkeypatch)
    report = probe_model(zoo.vision("gemma3"))
    assert list_failed(report) == ["image chunks", SPLIT, "image prefix"] and report.methods.library_chunks
    assert report.images == ""


def test_tokens_may_have_to_be_computed_up_to_the_last_image_at_once(zoo: Zoo, monkeypatch: Patch) -> None:
    """Chunks that begin behind the first token and hold an image are wrong; features are cached."""
    original = VisionModelCaller.prefill

    def prefill(self: Any, ids: mx.array, cache: Any, start: int, inputs: Any, *rest: Any) -> mx.array:
        if start > 0 and mx.any(ids == self.embedder.tokens.image).item():
            inputs = replace(inputs, embeds=inputs.embeds + 1)
        return original(self, ids, cache, start, inputs, *rest)

    monkeypatch.setattr(VisionModelCaller, "prefill", prefill)
    report = probe_model(zoo.vision("gemma3"))
    assert list_failed(report) == ["image chunks", SPLIT]
    assert report.methods.whole_media and not report.methods.library_chunks and report.methods.snapshots
    assert report.images == "" and report.features_cached


def plant_in_model(monkeypatch: Patch, spoil: Callable[[Any, mx.array], mx.array]) -> None:
    """What the library makes of images is spoiled by a function of the model and the embeddings."""
    original = Idefics3.get_input_embeddings

    def get_input_embeddings(self: Any, ids: Any = None, pixels: Any = None, **given: Any) -> Any:
        found = original(self, ids, pixels, **given)
        if pixels is not None:
            found.inputs_embeds = spoil(self, found.inputs_embeds)
        return found

    monkeypatch.setattr(Idefics3, "get_input_embeddings", get_input_embeddings)


def test_images_that_differ_from_call_to_call_are_refused(zoo: Zoo, monkeypatch: Patch) -> None:
    """Every other call adds something; text is answered as ever."""
    calls = itertools.count()
    plant_in_model(monkeypatch, lambda model, embeds: embeds + next(calls) % 2)
    engine = engine_driver.make_real_engine(zoo.vision("idefics3"))
    report = engine.load_check
    assert report is not None and list_failed(report) == ["image again"]
    assert report.images.startswith("refused: the library does not compute images alike each time")
    images = vision_models.images(3, 1)
    prompt = vision_models.prompt("idefics3", "a", None)
    ask = engine_driver.make_vision_request(engine, "seen", prompt, images, max_tokens=4)
    text = engine_driver.make_vision_request(engine, "text", vision_models.prompt("idefics3", "a"))
    events = engine_driver.run_requests(engine, [ask, text])
    assert "does not compute images alike each time" in str(events["seen"].error)
    assert "images alike each time" in engine.model_info.refused_media["images"]
    engine_driver.check_answer(events["text"], zoo.see("idefics3", vision_models.prompt("idefics3", "a")))


def test_a_model_that_keeps_what_images_gave_is_refused(zoo: Zoo, monkeypatch: Patch) -> None:
    def keep(model: Any, embeds: mx.array) -> mx.array:
        model._last_image = {"embeds": embeds}
        return embeds

    plant_in_model(monkeypatch, keep)
    report = probe_model(zoo.vision("idefics3"))
    assert list_failed(report) == ["image again"] and "keeps _last_image of the last images" in report.images


def test_a_library_that_takes_one_image_is_compared_with_one(zoo: Zoo, monkeypatch: Patch) -> None:
    original = image_checks.embed_by_library

    def embed(model: Any, ids: Any, media: Any) -> Any:
        if media and media["pixel_values"].shape[1] > 1:
            raise ValueError("one image only")
        return original(model, ids, media)

    monkeypatch.setattr(image_checks, "embed_by_library", embed)
    report = probe_model(zoo.vision("idefics3"))
    assert report.images == "" and "image chunks" in {check.name for check in report.checks}


def test_a_model_whose_images_cannot_be_made_says_so(
    zoo: Zoo, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    def process(*given: Any) -> Any:
        raise MediaError("no pixels")

    monkeypatch.setattr(LoadedModelInfo, "process", process)
    report = probe_model(zoo.vision("idefics3"))
    assert report.images == "not compared: MediaError: no pixels"
    assert "images are not compared for this model" in caplog.text and list_failed(report) == []


def test_a_library_whose_own_call_fails(zoo: Zoo, monkeypatch: Patch) -> None:
    def fail(self: Any, reference: Any) -> Any:
        raise RuntimeError("broken tower")

    monkeypatch.setattr(image_checks.ImageChecks, "call_library", fail)
    report = probe_model(zoo.vision("idefics3"))
    assert report.images == "not compared: the library's own call fails: RuntimeError: broken tower"
