"""Audio as files: a tone of each frequency, in every format that is read."""

from __future__ import annotations

import base64
import io
import struct

import numpy as np

CODECS = {
    "mp3": "libmp3lame",
    "flac": "flac",
    "ogg": "libopus",
    "m4a": "aac",
    "webm": "libopus",
    "mka": "pcm_s16le",
}
FORMATS = {"m4a": "mp4", "mka": "matroska"}  # names of FFmpeg's that differ


def make_tone(seconds: float = 0.5, rate: int = 16_000, channels: int = 1, hertz: float = 440) -> np.ndarray:
    """A tone and an octave of it, int16 [n, channels]; each channel is softer than the one before."""
    at = np.arange(round(seconds * rate)) / rate
    wave = np.sin(2 * np.pi * hertz * at) + 0.3 * np.sin(4 * np.pi * hertz * at)
    loud = 9000 / np.arange(1, channels + 1)
    return np.round(wave[:, None] * loud).astype(np.int16)


def make_wav(samples: np.ndarray, rate: int = 16_000, *, declared: int | None = None) -> bytes:
    """A WAV of samples [n, channels]. `declared`: the bytes that it says that they have."""
    data, channels = samples.astype("<i2").tobytes(), samples.shape[1]
    size = len(data) if declared is None else declared
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate * channels, 2 * channels, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", min(36 + size, 0xFFFFFFFF)) + body


def make_audio(kind: str = "wav", seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> bytes:
    """A tone as a file of this kind."""
    samples = make_tone(seconds, rate, channels)
    if kind == "wav":
        return make_wav(samples, rate)
    import av

    target = io.BytesIO()
    with av.open(target, "w", format=FORMATS.get(kind, kind)) as container:
        layout = {1: "mono", 2: "stereo"}[channels]
        stream = container.add_stream(CODECS[kind], rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return target.getvalue()


def audio_url(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
