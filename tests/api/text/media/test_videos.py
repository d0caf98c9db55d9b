"""Videos of requests: which frames are taken, the limits, what is refused, and processes that end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.api.text.media import videos
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.media_kinds import VIDEO as KIND
from mlxrun.api.text.media.media_kinds import MediaRef
from mlxrun.api.text.media.videos import measure_video, read_frames
from mlxrun.config.media_settings import Video, VideoSampling
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError, RequestError
from tests.helpers.tokenizers import FakeModelInfo
from tests.helpers.video_files import GREYS, make_video, video_url

SAMPLING = VideoSampling(fps=2.0, min_frames=4, max_frames=768, multiple=2)
MODEL = FakeModelInfo(vision=True, video_sampling=SAMPLING)
VIDEO = make_video()
CLIP = MediaRef(video_url(VIDEO), "p", KIND)


async def load(*refs: MediaRef, base: Path | None = None, model: Any = MODEL, **options: Any) -> list[Any]:
    memory = options.pop("memory", 10**9)
    loader = MediaLoader(MediaSettings(**options), base, memory_bytes=memory)
    async with loader.load_images(refs, model) as loaded:
        return list(loaded)


async def refuse(*refs: MediaRef, **options: Any) -> str:
    with pytest.raises((MediaError, RequestError)) as caught:
        await load(*refs, **options)
    return str(caught.value)


def list_greys(video: Video) -> list[int]:
    return [int(frame[0, 0, 0]) for frame in video.frames]


@pytest.mark.parametrize(
    ("sampling", "total", "fps"),
    [
        (SAMPLING, 300, 30.0),
        (SAMPLING, 3, 30.0),
        (SAMPLING, 7, 1.0),
        (SAMPLING, 100_000, 25.0),
        (VideoSampling(1.5, 5, 33, 2), 997, 23.976),
    ],
)
def test_frames_are_those_of_the_library(sampling: VideoSampling, total: int, fps: float) -> None:
    """mlx-vlm's `load_video` with a reader that has frames of any number."""
    import cv2
    from mlx_vlm.utils import VideoSampling as LibrarySampling
    from mlx_vlm.utils import load_video

    class Reader:
        def __init__(self, path: str) -> None:
            pass

        def get(self, key: int) -> float:
            return {cv2.CAP_PROP_FRAME_COUNT: total, cv2.CAP_PROP_FPS: fps}.get(key, 1)

        def read(self) -> tuple[bool, np.ndarray]:
            return True, np.zeros((1, 1, 3), np.uint8)

        def isOpened(self) -> bool:
            return True

        def set(self, key: int, value: int) -> None:
            pass

        def release(self) -> None:
            pass

    received = LibrarySampling(
        sampling.fps, None, sampling.min_frames, sampling.max_frames, sampling.multiple
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cv2, "VideoCapture", Reader)
        _, reported = load_video("", received)
    assert sampling.choose_frames(total, fps) == reported.frames_indices
    assert SAMPLING.choose_frames(1, 30.0) == []


async def test_frames_of_a_video_as_settings_choose_them(tmp_path: Path) -> None:
    (tmp_path / "a.mkv").write_bytes(VIDEO)
    (video,) = await load(MediaRef("a.mkv", "p", KIND), base=tmp_path)
    assert (video.indices, video.total, video.fps) == ((0, 2, 4, 7, 9, 11), len(GREYS), 4.0)
    assert video.frames.shape == (6, 3, 32, 32) and list_greys(video) == [GREYS[i] for i in video.indices]
    options = {"video_fps": 4.0, "video_max_frames": 5, "video_max_pixels": 1024}
    (wide,) = await load(MediaRef(video_url(make_video(size=(128, 32), kind="mp4")), "p", KIND), **options)
    assert wide.indices == (0, 4, 7, 11) and wide.frames.shape == (4, 3, 16, 64)
    assert np.allclose(list_greys(wide), [GREYS[i] for i in wide.indices], atol=8)


async def test_limits_and_errors_name_the_video(tmp_path: Path) -> None:
    url = video_url(VIDEO)
    blind = FakeModelInfo(vision=True)
    assert await refuse(CLIP, model=blind) == "p: the model 'fake' does not accept videos"
    many = [MediaRef(url, f"p{at}", KIND) for at in range(2)]
    assert await refuse(*many, max_videos=1) == "p1: 2 videos are more than media.max_videos (1)"
    small = {"video_max_bytes": 1000}
    assert await refuse(many[0], **small) == "p0: it has more than media.video_max_bytes (1000)"
    short = {"video_max_seconds": 2.5}
    assert await refuse(many[0], **short) == "p0: the video is longer than media.video_max_seconds (2.5)"
    assert "a frame has 32 x 32 pixels, more than media.max_pixels (1000)" in await refuse(
        many[0], max_pixels=1000
    )
    assert "more than media.memory_bytes" in await refuse(many[0], memory=50_000)
    assert "the video has 1 frames, and the model takes at least 2" in await refuse(
        MediaRef(video_url(make_video(GREYS[:1])), "p", KIND)
    )
    assert "expected data:video/...;base64" in await refuse(MediaRef("data:image/png;base64,AAAA", "p", KIND))
    assert "outside media.roots" in await refuse(MediaRef("../a.mp4", "p", KIND), base=tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n",
        b"\x1aE\xdf\xa3\nv=0\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        VIDEO[:40],
    ],
)
def test_what_is_no_video_is_refused(data: bytes) -> None:
    """Also a playlist, which could name other files, and streams that are described behind a video's head."""
    with pytest.raises(MediaError, match="not a readable video"):
        measure_video(data, 600, 10**6)


def test_a_video_that_ends_early_has_fewer_frames() -> None:
    whole = make_video([10 * i for i in range(20)], size=(64, 64))
    cut = whole[: len(whole) * 2 // 3]
    frames = read_frames(cut, list(range(0, 20, 2)), 10**6)
    assert 0 < len(frames) < 10
    assert [int(frame[0, 0, 0]) for frame in frames] == [20 * i for i in range(len(frames))]


def test_a_reader_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "SECONDS", 0)
    with pytest.raises(MediaError, match="more than 0 seconds of processor time"):
        measure_video(VIDEO, 600, 10**6)
