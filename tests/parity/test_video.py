"""Prompts with videos give what the ORACLE gives for the same frames; planted bugs must be found.

The families take videos in different ways: qwen3_vl and qwen3_5 write a time before each pair of frames;
qwen2_5_vl has one block of tokens for a video. Of a prompt with both, mlx-vlm's qwen2_5_vl leaves out the
videos, and its qwen3_5 fails (`see_both`).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.config.media_settings import Video
from mlxrun.config.settings import Config, MediaSettings, ModelSettings
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Request
from mlxrun.engine.engine import Engine
from mlxrun.model.load import model_info
from mlxrun.model.vision import media_processing
from mlxrun.model.vision.features import ImageFeatures
from tests.helpers import engine_driver, oracle, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo
from tests.helpers.oracle import Answer
from tests.helpers.video_files import make_video, video_url
from tests.parity.test_vision import push_out
from tests.parity.test_vision_mutations import delta_dropped, looks_at_images

Patch = pytest.MonkeyPatch
Case = tuple[str | Image.Image | Video, ...]
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "qwen3_5"]
COUNT = 10
A, B = vision_models.video(1), vision_models.video(2, 6, (48, 32), fps=6.0)
SWAPPED = replace(A, frames=A.frames[[1, 0, *range(2, len(A.frames))]])
SLOWER = replace(A, fps=2.0)
RED = vision_models.images(3, 1, size=(32, 32))[0]
TURN = "<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\n"
CASES: dict[str, Case] = {
    "one": ("what is ", A, " and tell me more about it, please"),
    "two": (B, "hm", A, "which one?"),
    "turns": ("look: ", A, TURN, "and ", B, "?"),
    "text": ("just text, no video",),
    "image": ("what is ", RED, "?"),
}
MIXED: Case = ("look at ", A, " and ", RED, " or ", B, "?")


def render(family: str, case: Case) -> tuple[str, list[Image.Image], list[Video]]:
    """A prompt, its images and its videos."""
    marks = {Video: vision_models.VIDEO_PLACEHOLDER, Image.Image: vision_models.placeholder(family)}
    text = "".join(part if isinstance(part, str) else marks[type(part)] for part in case)
    images = [part for part in case if isinstance(part, Image.Image)]
    return vision_models.prompt(family, text), images, [part for part in case if isinstance(part, Video)]


def make_request(engine: Engine, family: str, name: str, case: Case) -> Request:
    text, images, videos = render(family, case)
    if not images and not videos:
        return engine_driver.make_vision_request(engine, name, text, max_tokens=COUNT)
    made = engine.model_info.process(text, images, videos)
    request = engine_driver.make_text_request(name, made.ids, max_tokens=COUNT)
    return replace(request, image_spans=made.image_spans, media=made.media, image_digests=made.image_digests)


_answers: dict[tuple[Path, str], Answer] = {}


def see(zoo: Zoo, family: str, name: str, case: Case) -> Answer:
    key = (zoo.video(family), name)
    if key not in _answers:
        text, images, videos = render(family, case)
        with pytest.MonkeyPatch.context() as patch:
            if case is MIXED and family != "qwen3_vl":
                see_both(patch, family)
            _answers[key] = oracle.vision_answer(key[0], text, images, COUNT, videos)
    return _answers[key]


def see_both(patch: Patch, family: str) -> None:
    """The library's model puts the features of images and those of videos in the place of their tokens, as
    transformers' does. Each kind goes through the vision tower by itself."""
    from mlx_vlm.models.base import InputEmbeddingsFeatures

    module = importlib.import_module(f"mlx_vlm.models.{family}")

    def embed(self: Any, ids: mx.array, pixels: Any = None, mask: Any = None, **media: Any) -> Any:
        embeds = self.language_model.model.embed_tokens(ids)
        grids = media.get("image_grid_thw"), media.get("video_grid_thw")
        tokens = (self.config.image_token_id, self.config.video_token_id)
        for token, array, grid in zip(tokens, (pixels, media.get("pixel_values_videos")), grids, strict=True):
            if array is not None:
                features = self.vision_tower(array, grid)
                features = features[0] if isinstance(features, tuple) else features
                embeds[0, mx.array(np.flatnonzero(np.array(ids[0]) == token))] = features
        positions, deltas = self.language_model.get_rope_index(ids, *grids, mask)
        return InputEmbeddingsFeatures(inputs_embeds=embeds, position_ids=positions, rope_deltas=deltas)

    patch.setattr(module.Model, "get_input_embeddings", embed)


def run(engine: Engine, zoo: Zoo, family: str, cases: dict[str, Case], each: Any = lambda step: None) -> None:
    requests = [make_request(engine, family, name, case) for name, case in cases.items()]
    joins = [TimedRequest(request, add_step=4 * i % 9) for i, request in enumerate(requests)]
    for name, event in engine_driver.run_requests(engine, joins, each).items():
        answer = see(zoo, family, name, cases[name])
        assert next(request for request in requests if request.id == name).prompt == answer.ids
        engine_driver.check_answer(event, answer)


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_beside_images_and_text(zoo: Zoo, family: str) -> None:
    """In one batch with late joins; in small chunks, none of which ends inside a span; after preemption."""
    engine = engine_driver.make_real_engine(zoo.video(family), chunk=16, prefill_budget=32)
    assert engine.load_check is not None and not engine.load_check.images and not engine.load_check.videos
    passed = {check.name: check.passed for check in engine.load_check.checks}
    assert passed["video chunks"] and passed["video features"] and passed["video among text"]
    assert passed["image beside video"]
    run(engine, zoo, family, CASES | {"mixed": MIXED}, push_out(engine))


def test_a_call_that_leaves_out_videos_is_found(zoo: Zoo, monkeypatch: Patch) -> None:
    """The mutation twin: images and videos go through one call of the library."""
    monkeypatch.setattr("mlxrun.model.vision.embedder.group_by_kind", lambda media: {"image": media})
    engine = engine_driver.make_real_engine(zoo.video("qwen2_5_vl"))
    request = make_request(engine, "qwen2_5_vl", "mixed", MIXED)
    error = engine_driver.run_requests(engine, [request])["mixed"].error
    assert "images beside videos are refused for this model" in str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_in_the_prefix_cache(zoo: Zoo, family: str) -> None:
    """Found again as it is; not with other frames, other times or another order."""
    engine = engine_driver.make_real_engine(zoo.video(family), chunk=8)
    assert compare_again(engine, zoo, family, [("a", A), ("swapped", SWAPPED), ("slower", SLOWER)]) == []
    request = make_request(engine, family, "again", ("what is ", A, " and tell me more"))
    event = engine_driver.run_requests(engine, [request])["again"]
    assert event.num_cached_tokens >= request.image_spans[-1][1]
    assert len({make_request(engine, family, "", (v,)).image_digests for v in (A, SWAPPED, SLOWER)}) == 3


def compare_again(engine: Engine, zoo: Zoo, family: str, videos: Sequence[tuple[str, Video]]) -> list[str]:
    """The videos with which one prompt after the other has another answer than alone and cold."""
    wrong = []
    for name, video in videos:
        case = ("what is ", video, " and tell me more")
        event = engine_driver.run_requests(engine, [make_request(engine, family, name, case)])[name]
        if engine_driver.has_other_answer(event, see(zoo, family, f"again {name}", case)):
            wrong.append(name)
    return wrong


def digest_the_set_of_frames(monkeypatch: Patch) -> None:
    """Two videos with the same frames in another order have one digest."""
    original = media_processing.compute_video_digest
    order = lambda video: replace(video, frames=np.sort(video.frames, axis=0))  # noqa: E731
    monkeypatch.setattr(
        media_processing, "compute_video_digest", lambda video, key: original(order(video), key)
    )


def test_swapped_frames_are_found(zoo: Zoo, monkeypatch: Patch) -> None:
    digest_the_set_of_frames(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.video("qwen3_vl"), chunk=8)
    assert compare_again(engine, zoo, "qwen3_vl", [("a", A), ("swapped", SWAPPED)]) == ["swapped"]


def swap_features(monkeypatch: Patch) -> None:
    """The videos of a prompt that is assembled change places."""

    def concatenate(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        arrays = zip(*(part.list_arrays() for part in reversed(parts)), strict=True)
        embeddings, *deepstack = (mx.concatenate(array) for array in arrays)
        return ImageFeatures(embeddings, tuple(deepstack))

    monkeypatch.setattr(ImageFeatures, "concatenate", staticmethod(concatenate))


def shift_positions(monkeypatch: Patch) -> None:
    """Each token of the prompt has the position of the one before."""

    def change(inputs: Any) -> Any:
        moved = inputs.positions if inputs.positions is None else mx.roll(inputs.positions, 1, axis=-1)
        return replace(inputs, positions=moved)

    looks_at_images(monkeypatch, change)


def test_planted_bugs_are_found(zoo: Zoo) -> None:
    """By the answers, and by the load check."""
    folder, case = zoo.video("qwen3_vl"), (A, "hm", B, "which one?")
    engine = engine_driver.make_real_engine(folder, backend="none")
    warm = make_request(engine, "qwen3_vl", "warm", CASES["two"])
    engine_driver.run_requests(engine, [warm])  # both videos are known, so that features are assembled
    request = make_request(engine, "qwen3_vl", "x", case)
    for mutate in (None, delta_dropped, shift_positions, swap_features):
        with pytest.MonkeyPatch.context() as patch:
            if mutate is not None:
                mutate(patch)
            event = engine_driver.run_requests(engine, [request])["x"]
            is_other = engine_driver.has_other_answer(event, see(zoo, "qwen3_vl", "other", case))
            assert is_other == bool(list_failed(probe_model(folder))) == (mutate is not None), mutate


def test_a_chat_gives_the_request_of_its_frames(zoo: Zoo) -> None:
    """A video_url part, by way of the template; one without videos refuses it by name."""
    greys = [20 * i for i in range(8)]
    url = video_url(make_video(greys))
    content = [{"type": "text", "text": "a"}, {"type": "video_url", "video_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}]}

    model = ModelSettings(path=str(zoo.video("qwen3_vl")))
    config = Config(model=model, media=MediaSettings(video_fps=2))
    info = model_info.load_model_info(model)
    context = ApiContext(info, config, MediaLoader(config.media, None))
    request = asyncio.run(prepare_request("/v1/chat/completions", body, context)).requests[0]
    frames = np.stack([np.full((3, 32, 32), greys[at], np.uint8) for at in (0, 2, 5, 7)])
    made = info.process(*render("qwen3_vl", ("a", Video(frames, (0, 2, 5, 7), 8, 4.0))))
    assert (request.prompt, request.image_digests) == (made.ids, made.image_digests)
    assert all(np.array_equal(request.media[key], made.media[key]) for key in made.media)
    silent = model_info.load_model_info(ModelSettings(path=str(zoo.vision("qwen3_vl"))))
    content = [{"type": "video_url", "video_url": {"url": video_url(b"broken")}}]  # which is not even read
    body = {"messages": [{"role": "user", "content": content}]}
    context = ApiContext(silent, config, MediaLoader(config.media, None))
    with pytest.raises(RequestError, match=r"content\[0\].*: the model.*(render|accept) videos"):
        asyncio.run(prepare_request("/v1/chat/completions", body, context))
    with pytest.raises(RequestError, match="chat template does not render videos"):
        get_image_markers(silent).check(made.ids, {"video": 1})
