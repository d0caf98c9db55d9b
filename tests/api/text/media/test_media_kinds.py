"""What a model does not take is refused before it is read, and errors have codes of their own."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.media_kinds import AUDIO, PDF, VIDEO, MediaRef, check_model_takes
from mlxrun.api.text.templates.template import ImageMarkers
from mlxrun.config.media_settings import AudioSampling, VideoSampling
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError, RequestError
from tests.helpers.tokenizers import FakeModelInfo

PICTURE, PAPER, CLIP = MediaRef("?", "a"), MediaRef("?", "b", PDF), MediaRef("?", "c", VIDEO)
MEMO = MediaRef("?", "d", AUDIO)
SAMPLING = VideoSampling(2.0, 2, 16, 2)
AUDIO_SAMPLING = AudioSampling(16_000)


@pytest.mark.parametrize(
    ("refs", "vision", "said"),
    [
        ([PICTURE], False, "a: the model 'fake' does not accept images"),
        (
            [PAPER],
            False,
            "b: the model 'fake' does not accept images, which the pages of a PDF become; send its",
        ),
        ([CLIP, PICTURE], False, "c: the model 'fake' does not accept videos"),
        ([PICTURE, PAPER, CLIP], True, "c: the model 'fake' does not accept videos"),
        ([MEMO], True, "d: the model 'fake' does not accept audio"),
        ([PICTURE, MEMO], False, "a: the model 'fake' does not accept images"),
    ],
)
async def test_what_a_model_does_not_take(refs: list[MediaRef], vision: bool, said: str) -> None:
    """Also where something before it is broken, or it is broken itself."""
    model: Any = FakeModelInfo(vision=vision)
    loader = MediaLoader(MediaSettings(), None)
    with pytest.raises(RequestError, match=said):
        check_model_takes(refs, model)
    with pytest.raises(RequestError, match=said):
        await loader.open_documents([], refs, model)


@pytest.mark.parametrize(
    ("refused", "refs", "said"),
    [
        ({"videos": "why"}, [PICTURE, CLIP], "c: videos are refused for this model: why"),
        ({"images": "why"}, [CLIP, PAPER], "b: images are refused for this model: why"),
        (
            {"images beside videos": "why"},
            [PICTURE, CLIP],
            "a: images beside videos are refused for this",
        ),
        ({"images beside videos": "why", "videos": ""}, [CLIP, CLIP], None),
        ({"audio": "why"}, [CLIP, MEMO], "d: audio is refused for this model: why"),
        ({"videos beside audio": "why"}, [PICTURE, CLIP, MEMO], "c: videos beside audio are refused"),
        ({"audio beside audio": "why"}, [PICTURE, MEMO, MEMO], "d: audio beside audio is refused"),
        ({"audio beside audio": "why", "images beside audio": ""}, [PICTURE, MEMO], None),
    ],
)
async def test_what_the_check_at_load_refuses_is_not_read(
    refused: dict[str, str], refs: list[MediaRef], said: str | None
) -> None:
    model: Any = FakeModelInfo(
        vision=True, video_sampling=SAMPLING, audio_sampling=AUDIO_SAMPLING, refused_media=refused
    )
    if said is None:
        check_model_takes(refs, model)
        return
    with pytest.raises(RequestError, match=said):
        async with MediaLoader(MediaSettings(), None).load_images(refs, model):
            pass


def test_a_processor_that_takes_one_audio() -> None:
    model: Any = FakeModelInfo(vision=True, audio_sampling=AudioSampling(16_000, several=False))
    check_model_takes([MEMO, PICTURE], model)
    with pytest.raises(RequestError, match="e: the processor of 'fake' takes one audio part"):
        check_model_takes([MEMO, PICTURE, MediaRef("?", "e", AUDIO)], model)


def test_what_a_template_leaves_out() -> None:
    markers = ImageMarkers({"image": {}})
    markers.check_rendered([PICTURE, PAPER])
    with pytest.raises(
        RequestError, match="c: not supported: the model's chat template does not render videos"
    ):
        markers.check_rendered([PICTURE, CLIP])


@pytest.mark.parametrize(
    ("ref", "code"),
    [
        (PICTURE, "invalid_image"),
        (PAPER, "invalid_document"),
        (CLIP, "invalid_video"),
        (MEMO, "invalid_audio"),
    ],
)
async def test_codes(ref: MediaRef, code: str) -> None:
    model: Any = FakeModelInfo(vision=True, video_sampling=SAMPLING, audio_sampling=AUDIO_SAMPLING)
    loader = MediaLoader(MediaSettings(), None)
    with pytest.raises(MediaError, match=f"^{ref.param}: file paths are not supported") as caught:
        _, refs = await loader.open_documents([], [ref], model)
        async with loader.load_images(refs, model):
            pass
    assert (caught.value.code, caught.value.param) == (code, ref.param)
