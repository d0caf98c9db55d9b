"""Videos as files: frames of one colour each, in a codec without loss."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Colours of some frames, which their codec keeps.
GREYS = tuple(range(0, 240, 20))


def make_video(
    greys: Sequence[int] = GREYS, size: tuple[int, int] = (32, 32), fps: float = 4.0, kind: str = "mkv"
) -> bytes:
    """A video that shows a frame of each grey. `kind`: mkv keeps every pixel, mp4 nearly."""
    import cv2

    codec = {"mkv": "FFV1", "mp4": "mp4v", "avi": "MJPG"}[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"video.{kind}"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), fps, size)
        for grey in greys:
            writer.write(np.full((size[1], size[0], 3), grey, np.uint8))
        writer.release()
        return path.read_bytes()


def video_url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
