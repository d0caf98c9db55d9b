"""The options of images, PDFs and videos in requests. See settings.py.

The string under a field is its description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mlxrun.config.setting_annotations import Bytes, Range


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Which images, PDFs and videos are accepted, and how large they may be."""

    allow_urls: bool = False
    """Fetch images, PDFs and videos from http(s) URLs."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts from which they may be fetched. Empty: every public host."""
    roots: tuple[str, ...] = (".",)
    """Folders from which a job may read images, PDFs and videos, relative to the job file; it reads no other
    file."""
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
    memory_bytes: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Memory for decoded images and frames of all requests together, which counts in scheduler.memory_limit.
    They wait for it; a request that needs more is refused. null: 1GB, at most an eighth of a given
    memory_limit."""
    timeout: Annotated[float, Range(0.1, None)] = 20.0
    """Seconds that fetching one URL may take."""
