"""Videos as a model's processor takes them: how many frames it asks for, its arguments, and digests."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxrun.config.video_sampling import Video, VideoSampling
from mlxrun.model.vision.image_units import read_media_token

log = logging.getLogger(__name__)


def read_video_sampling(processor: Any, config: Mapping[str, Any]) -> VideoSampling | None:
    """How a processor takes frames of a video, as the library says; None if the model takes no videos, or
    chooses frames by a rule of its own."""
    from mlx_vlm.generate.video import processor_handles_video
    from mlx_vlm.utils import resolve_video_sampling

    if read_media_token(config, "video") is None or not processor_handles_video(processor):
        return None
    component = processor.video_processor
    if getattr(component, "sample_frames_in_loader", False):
        log.info("videos are not accepted: the model's processor chooses frames by a rule of its own")
        return None
    found = resolve_video_sampling(processor, {})
    # What the library merges is checked here, since it may come from a checkpoint's files.
    numbers = (found.fps, found.min_frames, found.max_frames, found.frame_factor)
    if found.nframes is not None or not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        return None
    return VideoSampling(float(found.fps), *(int(n) for n in numbers[1:]))


def list_video_arguments(videos: Sequence[Video]) -> dict[str, Any]:
    """The arguments of mlx-vlm's `prepare_inputs` for these videos."""
    if not videos:
        return {}
    described = [
        {
            "total_num_frames": video.total,
            "fps": video.fps,
            "frames_indices": list(video.indices),
            "width": video.frames.shape[3],
            "height": video.frames.shape[2],
            "duration": video.total / video.fps,
        }
        for video in videos
    ]
    return {"videos": [video.frames for video in videos], "video_metadata": described}


def compute_video_digest(video: Video, settings: bytes = b"") -> bytes:
    """A digest of 16 bytes of a video's frames, of when they are shown, and of its processor's settings."""
    found = hashlib.blake2b(settings, digest_size=16)
    found.update(f"video {video.frames.shape} {video.indices} {video.total} {video.fps!r}".encode())
    for frame in video.frames:
        found.update(np.ascontiguousarray(frame).data)
    return found.digest()
