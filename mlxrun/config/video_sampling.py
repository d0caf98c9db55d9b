"""Which frames of a video a model gets: what its processor asks for, within the limits of the config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlxrun.config.media_settings import MediaSettings


@dataclass(frozen=True, slots=True)
class VideoSampling:
    """`fps`: frames of a second; `min_frames` and `max_frames` of a video; their number is a multiple of
    `multiple`."""

    fps: float
    min_frames: int
    max_frames: int
    multiple: int

    def limit(self, settings: MediaSettings) -> VideoSampling:
        """This sampling with the rate of the config, and at most as many frames as it allows."""
        most = min(self.max_frames, settings.video_max_frames)
        fps = settings.video_fps or self.fps
        return replace(self, fps=fps, max_frames=most, min_frames=min(self.min_frames, most))

    def choose_frames(self, total: int, source_fps: float) -> list[int]:
        """The indices of the frames that are taken of a video of `total` frames, as mlx-vlm chooses them:
        evenly from the first to the last. Empty if the video has too few."""
        least = -(-self.min_frames // self.multiple) * self.multiple
        most = min(self.max_frames, total) // self.multiple * self.multiple
        count = int(min(max(total / source_fps * self.fps, least), most, total))
        count = count // self.multiple * self.multiple
        return [int(index) for index in np.linspace(0, total - 1, count).round()]


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames in RGB, uint8 [frames, 3, height, width]. `indices`: of the frames among the `total` ones of the
    video, of which `fps` are shown in a second."""

    frames: np.ndarray[Any, Any]
    indices: tuple[int, ...]
    total: int
    fps: float
