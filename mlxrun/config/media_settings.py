"""The options of images, PDFs, videos and audio in requests, the memory for decoded images, and how videos
and audio are sampled.

See settings.py: the string under a field is its description.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from mlxrun.config.setting_annotations import Bytes, Range

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Which images, PDFs, videos and audio are accepted, and how large they may be."""

    allow_urls: bool = False
    """Fetch images, PDFs, videos and audio from http(s) URLs."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts from which they may be fetched. Empty: every public host."""
    roots: tuple[str, ...] = (".",)
    """Folders from which a job may read images, PDFs, videos and audio, relative to the job file; it reads no
    other file."""
    max_bytes: Annotated[int, Bytes(), Range(1, None)] = 20_000_000
    """Maximum size of an encoded image, or of a PDF."""
    max_pixels: Annotated[int, Range(1, None)] = 50_000_000
    """Maximum number of pixels of an image, width x height."""
    max_images: Annotated[int, Range(1, 1024)] = 16
    """Maximum number of images in a request, pages of PDFs not counted."""
    max_pages: Annotated[int, Range(1, 1000)] = 20
    """Maximum number of pages of all PDFs in a request. Each becomes an image."""
    pdf_dpi: Annotated[int, Range(36, 600)] = 144
    """Dots per inch of the pages of PDFs; fewer for a page that would have more than 4 megapixels."""
    max_videos: Annotated[int, Range(0, 64)] = 4
    """Maximum number of videos in a request."""
    video_max_bytes: Annotated[int, Bytes(), Range(1, None)] = 100_000_000
    """Maximum size of an encoded video."""
    video_max_seconds: Annotated[float, Range(0.1, None)] = 600.0
    """Maximum length of a video."""
    video_fps: Annotated[float | None, Range(0.01, 120)] = None
    """Frames that are taken of a second of a video. null: as many as the model's processor says, mostly 2."""
    video_max_frames: Annotated[int, Range(2, 4096)] = 64
    """Maximum number of frames of a video; of a longer one fewer are taken of each second. The limit of the
    model's processor holds too."""
    video_max_pixels: Annotated[int, Range(1024, None)] = 602_112
    """Maximum number of pixels of a frame, width x height; larger frames are reduced to it. The model's
    processor may reduce them more."""
    max_audio: Annotated[int, Range(0, 64)] = 4
    """Maximum number of audio parts in a request."""
    audio_max_bytes: Annotated[int, Bytes(), Range(1, None)] = 25_000_000
    """Maximum size of an encoded audio file."""
    audio_max_seconds: Annotated[float, Range(0.1, None)] = 600.0
    """Maximum length of an audio file."""
    memory_bytes: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Memory for decoded images and frames of all requests together, which counts in scheduler.memory_limit.
    They wait for it; a request that needs more is refused. null: 1GB, at most an eighth of a given
    memory_limit."""
    timeout: Annotated[float, Range(0.1, None)] = 20.0
    """Seconds that fetching one URL may take."""


DEFAULT_IMAGE_BYTES = 1_000_000_000
DEFAULT_FEATURE_BYTES = 256_000_000
_SHARE = 8  # at most this part of a configured memory limit, unless the config says otherwise


def get_image_bytes(configured: int | None, memory_limit: int | None) -> int:
    """Bytes for the decoded images of all requests at a time. `configured`: media.memory_bytes;
    `memory_limit`: scheduler.memory_limit."""
    return _limit_share(configured, DEFAULT_IMAGE_BYTES, memory_limit)


def get_feature_bytes(configured: int | None, memory_limit: int | None) -> int:
    """Bytes of the cache of image features. `configured`: cache.image_bytes; `memory_limit`:
    scheduler.memory_limit."""
    return _limit_share(configured, DEFAULT_FEATURE_BYTES, memory_limit)


def _limit_share(configured: int | None, default: int, memory_limit: int | None) -> int:
    if configured is not None:
        return configured
    return default if memory_limit is None else min(default, memory_limit // _SHARE)


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """How frames of a video are chosen. `fps`: frames per second; `min_frames`, `max_frames`: of a video;
    `multiple`: the number of frames is a multiple of it."""

    fps: float
    min_frames: int
    max_frames: int
    multiple: int

    def limit(self, settings: MediaSettings) -> VideoSampling:
        """This sampling with the config's rate and maximum number of frames."""
        most = min(self.max_frames, settings.video_max_frames)
        fps = settings.video_fps or self.fps
        return replace(self, fps=fps, max_frames=most, min_frames=min(self.min_frames, most))

    def choose_frames(self, total: int, source_fps: float) -> list[int]:
        """The indices of the chosen frames of a video with `total` frames, evenly spaced as in mlx-vlm. Empty
        if the video has too few."""
        import numpy as np

        least = -(-self.min_frames // self.multiple) * self.multiple
        most = min(self.max_frames, total) // self.multiple * self.multiple
        count = int(min(max(total / source_fps * self.fps, least), most, total))
        count = count // self.multiple * self.multiple
        return [int(index) for index in np.linspace(0, total - 1, count).round()]


@dataclass(frozen=True, slots=True)
class AudioSampling:
    """How a model takes audio. `rate`: samples per second; `max_samples`: of one audio, None if there is no
    limit; `several`: whether a prompt may have several."""

    rate: int
    max_samples: int | None = None
    several: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Audio:
    """Samples of one channel, float32 [n], `rate` of them a second."""

    samples: np.ndarray[Any, Any]
    rate: int


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames in RGB, uint8 [frames, 3, height, width]. `indices`: which of the video's `total` frames they
    are; `fps`: the video's frames per second."""

    frames: np.ndarray[Any, Any]
    indices: tuple[int, ...]
    total: int
    fps: float
