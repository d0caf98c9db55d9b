"""Videos in the messages of a request: which of their frames are read, and reading them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxrun.api.text.media.image_decoding import KEPT_BYTES
from mlxrun.api.text.media.video_process import PIXEL_BYTES, measure_video, read_frames, reduce_size
from mlxrun.config.media_settings import MediaSettings
from mlxrun.config.video_sampling import Video, VideoSampling
from mlxrun.core.errors import MediaError


@dataclass(frozen=True, slots=True)
class ChosenFrames:
    """What is read of a video: the frames with these indices, `width` x `height` each; it has `total` frames,
    `fps` of them in a second."""

    width: int
    height: int
    indices: Sequence[int]
    total: int
    fps: float

    @property
    def pixels(self) -> int:
        """Pixels of a frame."""
        return self.width * self.height

    def choose_factor(self, side: int | None) -> int:
        """Frames are not reduced by a factor, as images are: their size is limited."""
        return 1

    def count_kept_bytes(self, factor: int) -> int:
        """Bytes that the frames take until the processor is done."""
        return KEPT_BYTES * self.pixels * len(self.indices)

    def count_decoder_bytes(self, factor: int) -> int:
        """Bytes that are needed besides; those of the process that reads the frames are not counted."""
        return PIXEL_BYTES * self.pixels


def choose_frames(data: bytes, settings: MediaSettings, sampling: VideoSampling) -> ChosenFrames:
    """Which frames of a video are read. Raises MediaError if it is broken, too long or too large; it
    blocks."""
    header = measure_video(data, settings.video_max_seconds, settings.max_pixels)
    indices = sampling.limit(settings).choose_frames(header.total, header.fps)
    if not indices:
        text = f"the video has {header.total} frames, and the model takes at least {sampling.multiple}"
        raise MediaError(text)
    size = reduce_size(header.width, header.height, settings.video_max_pixels)
    return ChosenFrames(*size, indices, header.total, header.fps)


def read_video(data: bytes, chosen: ChosenFrames, settings: MediaSettings) -> Video:
    """The frames of a video; fewer if it ends before its header says. Raises as `choose_frames`."""
    frames = read_frames(data, chosen.indices, settings.video_max_pixels)
    indices = tuple(chosen.indices[: len(frames)])
    return Video(frames.transpose(0, 3, 1, 2), indices, chosen.total, chosen.fps)
