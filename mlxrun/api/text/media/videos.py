"""Videos in the messages of a request: choosing which of their frames are read, and reading them.

Each is read in a process of its own (media_process.py), with the FFmpeg inside OpenCV. Only containers that
hold their own data are read, since a playlist could name other files and addresses.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from mlxrun.api.text.media.image_decoding import KEPT_BYTES
from mlxrun.api.text.media.media_process import (
    read_exactly,
    read_first_size,
    run_child,
    start_reader,
    write_size,
)
from mlxrun.config.media_settings import MediaSettings, Video, VideoSampling
from mlxrun.core.errors import MediaError

SECONDS = 120  # of processor time
MEMORY = 4_000_000_000  # bytes of address space
PIXEL_BYTES = 3  # of a frame
FORMATS = "MP4, MOV, WebM, MKV, AVI"
_THREADS = 2
# FFmpeg looks at the data itself, and would take some for a description of streams on the network.
_CONTAINERS_ONLY = "format_whitelist;mov,matroska,webm,avi|protocol_whitelist;none"
_COUNT = struct.Struct("<Qd")  # frames, and frames of a second
_UNREADABLE = f"not a readable video ({FORMATS}), or a damaged one"


def measure_video(data: bytes, max_seconds: float, max_pixels: int) -> tuple[int, int, int, float]:
    """Return the width and height of a video in pixels, its number of frames, and its frames per second.

    MediaError if it is broken, longer than `max_seconds`, or if a frame has more than `max_pixels`. Abandoned
    if nobody waits any more."""
    with _start(data, "measure", str(max_seconds), str(max_pixels)) as output:
        width, height = read_first_size(output)
        total, fps = _COUNT.unpack(read_exactly(output, _COUNT.size))
    return width, height, total, fps


def read_frames(data: bytes, indices: Sequence[int], max_pixels: int) -> np.ndarray[Any, Any]:
    """Read the frames with these ascending indices, each reduced to `max_pixels`: RGB, uint8 [frames, height,
    width, 3]. There are fewer if the video ends early. MediaError if there is none, or the video is
    broken."""
    chosen = ",".join(map(str, indices))
    with _start(data, "read", chosen, str(max_pixels)) as output:
        width, height = read_first_size(output)
        frames = np.empty((len(indices), height, width, PIXEL_BYTES), np.uint8)
        count = 0
        while count < len(frames) and (size := output.readinto(memoryview(frames[count]).cast("B"))):  # type: ignore[attr-defined]
            if size < frames[count].nbytes:
                raise EOFError
            count += 1
    return frames[:count]


def reduce_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the size of a frame after it was reduced to at most `max_pixels`."""
    scale = math.sqrt(max_pixels / (width * height))
    if scale >= 1:
        return width, height
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


def _start(data: bytes, *arguments: str) -> AbstractContextManager[IO[bytes]]:
    module = "mlxrun.api.text.media.videos"
    return start_reader(module, arguments, data, seconds=SECONDS, memory=MEMORY, name="video")


@dataclass(frozen=True, slots=True)
class ChosenFrames:
    """The frames of a video that are read: their `indices`, and their size after reduction. `total`, `fps`:
    the frames of the video, and frames per second."""

    width: int
    height: int
    indices: Sequence[int]
    total: int
    fps: float

    @property
    def pixels(self) -> int:
        """The pixels of a frame."""
        return self.width * self.height

    def count_kept_bytes(self, factor: int) -> int:
        """Return the bytes that the frames take until the processor is done."""
        return KEPT_BYTES * self.pixels * len(self.indices)

    def count_decoder_bytes(self, factor: int) -> int:
        """Return the additional bytes while frames are read, without those of the child process."""
        return PIXEL_BYTES * self.pixels


def choose_frames(data: bytes, settings: MediaSettings, sampling: VideoSampling) -> ChosenFrames:
    """Choose which frames of a video are read; blocks. MediaError if it is broken, too long, too short or too
    large."""
    width, height, total, fps = measure_video(data, settings.video_max_seconds, settings.max_pixels)
    indices = sampling.limit(settings).choose_frames(total, fps)
    if not indices:
        text = f"the video has {total} frames, and the model takes at least {sampling.multiple}"
        raise MediaError(text)
    return ChosenFrames(*reduce_size(width, height, settings.video_max_pixels), indices, total, fps)


def read_video(data: bytes, chosen: ChosenFrames, settings: MediaSettings) -> Video:
    """Read the chosen frames of a video; blocks. There are fewer if it ends early. Raises as read_frames."""
    frames = read_frames(data, chosen.indices, settings.video_max_pixels)
    indices = tuple(chosen.indices[: len(frames)])
    return Video(frames.transpose(0, 3, 1, 2), indices, chosen.total, chosen.fps)


# The child.


def read_file(data: bytes, target: IO[bytes], task: str, first: str, max_pixels: str) -> None:
    """Write what is asked of a video. The task `measure` writes its size and number of frames; `first` is the
    maximum of seconds. The task `read` writes the size and pixels of the frames that `first` lists."""
    video = _open(data)
    if task == "measure":
        _measure(video, target, float(first), int(max_pixels))
    else:
        _read(video, target, [int(index) for index in first.split(",")], int(max_pixels))


def _open(data: bytes) -> Any:
    is_known = (
        data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3" or (data[:4], data[8:12]) == (b"RIFF", b"AVI ")
    )
    if not is_known:
        raise MediaError(_UNREADABLE)
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = _CONTAINERS_ONLY
    try:
        import cv2
    except ImportError as error:
        hint = "pip install 'mlxrun[vision]', or opencv-python-headless, which needs no graphics libraries"
        raise MediaError(f"videos need OpenCV, which cannot be imported: {error}; {hint}") from error
    cv2.setNumThreads(_THREADS)
    video = cv2.VideoCapture(io.BytesIO(data), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, _THREADS])
    if not video.isOpened():
        raise MediaError(_UNREADABLE)
    return video


def _measure(video: Any, target: IO[bytes], max_seconds: float, max_pixels: int) -> None:
    import cv2

    width, height = (int(video.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
    if width * height > max_pixels:
        raise MediaError(f"a frame has {width} x {height} pixels, more than media.max_pixels ({max_pixels})")
    fps = float(video.get(cv2.CAP_PROP_FPS))
    fps = fps if 0 < fps < math.inf else 1.0
    most = max_seconds * fps
    total = int(video.get(cv2.CAP_PROP_FRAME_COUNT))
    if total <= 0:  # a recording that was never closed does not say it
        total = 0
        while total <= most and video.grab():
            total += 1
    if total > most:
        raise MediaError(f"the video is longer than media.video_max_seconds ({max_seconds:g})")
    if not total or not width or not height:
        raise MediaError(_UNREADABLE)
    write_size(target, (width, height))
    target.write(_COUNT.pack(total, fps))


def _read(video: Any, target: IO[bytes], indices: Sequence[int], max_pixels: int) -> None:
    import cv2

    at, size = -1, None
    for index in indices:
        while at < index and video.grab():
            at += 1
        frame = video.retrieve()[1] if at == index else None
        if frame is None:
            break
        if size is None:
            size = reduce_size(frame.shape[1], frame.shape[0], max_pixels)
            write_size(target, size)
        if frame.shape[1::-1] != size:
            frame = cv2.resize(frame, size, interpolation=cv2.INTER_AREA)
        target.write(np.ascontiguousarray(frame[..., ::-1]).data)
    if size is None:
        raise MediaError("no frame of the video can be decoded")


if __name__ == "__main__":
    run_child(read_file)
