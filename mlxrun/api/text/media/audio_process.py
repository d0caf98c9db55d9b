"""Reads audio in a process of its own (media_process.py): decoded, mixed to one channel, resampled.

The samples are those that mlx-vlm reads. WAV, MP3 and FLAC come from miniaudio, which it uses too. Ogg, M4A
and WebM come from PyAV's FFmpeg, in place of the program `ffmpeg`. All are rounded to 16 bits, then mixed,
then resampled by mlx-audio. Only containers that hold their own data are read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

import numpy as np

from mlxrun.api.text.media.media_process import (
    read_exactly,
    read_first_size,
    run_child,
    start_reader,
    write_size,
)
from mlxrun.config.media_settings import Audio, AudioSampling, MediaSettings
from mlxrun.core.errors import MediaError

SECONDS = 120  # of processor time
MEMORY = 4_000_000_000  # bytes of address space
FORMATS = "WAV, MP3, FLAC, Ogg, M4A, WebM"
KEPT_BYTES = 32  # of a sample, while a processor makes features of it
MAX_RATE = 384_000  # samples per second of a file
_FULL_SCALE = 32768.0
_TORN = 0.25  # seconds that a whole file may lack of what its header says, as padding of encoders
_UNKNOWN = 1 << 28  # samples: what headers of recordings say that were written to a pipe
_CONTAINERS = {"format_whitelist": "ogg,mov,matroska,webm", "protocol_whitelist": "none"}
_UNREADABLE = f"not readable audio ({FORMATS}), or a damaged file"

Samples = np.ndarray[Any, np.dtype[np.float32]]
Source = tuple[int, float, Iterator[Samples]]


def read_audio(data: bytes, rate: int, settings: MediaSettings, most: int | None = None) -> Samples:
    """Read the audio of a file as samples in [-1, 1], one channel, `rate` of them a second; blocks.

    MediaError if it is broken, torn or empty, longer than `media.audio_max_seconds`, or if it has more than
    about `most` samples; no more is decoded then. Abandoned if nobody waits any more."""
    module = "mlxrun.api.text.media.audio_process"
    arguments = (rate, settings.audio_max_seconds, most or 0)
    with start_reader(module, arguments, data, seconds=SECONDS, memory=MEMORY, name="audio") as output:
        _, count = read_first_size(output)
        return np.frombuffer(read_exactly(output, 4 * count), np.float32)


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """Audio that was read, which counts as the headers of images do."""

    audio: Audio

    def count_kept_bytes(self, factor: int) -> int:
        """Return the bytes that the samples take until the processor is done."""
        return KEPT_BYTES * len(self.audio.samples)

    def count_decoder_bytes(self, factor: int) -> int:
        """Return 0: it is decoded."""
        return 0


def load_audio(data: bytes, sampling: AudioSampling, settings: MediaSettings) -> DecodedAudio:
    """Read audio for a model; blocks. MediaError as `read_audio`, and for audio that the model would cut
    off."""
    most = sampling.max_samples
    samples = read_audio(data, sampling.rate, settings, most)
    if most is not None and len(samples) > most:
        raise _make_refusal(len(samples) / sampling.rate, most / sampling.rate)
    return DecodedAudio(Audio(samples, sampling.rate))


def _make_refusal(seconds: float, most: float, least: str = "") -> MediaError:
    return MediaError(f"the audio has {least}{seconds:.1f} seconds, and the model takes at most {most:g}")


# The child.


def read_file(data: bytes, target: IO[bytes], rate: str, max_seconds: str, most: str = "0") -> None:
    """Write the rate and the number of samples, and the samples as float32. `most`: of them, 0 for any."""
    try:
        found, declared, parts = _open(data)
        samples = _join(found, declared, parts, float(max_seconds), int(most) / int(rate) or math.inf)
    except MediaError:
        raise
    except Exception as error:  # decoders of untrusted bytes raise exceptions of any class
        raise MediaError(_UNREADABLE) from error
    if found != int(rate):
        from mlx_audio.resample import resample_audio_array

        samples = resample_audio_array(samples, found, int(rate))
    write_size(target, (int(rate), len(samples)))
    target.write(np.ascontiguousarray(samples, np.float32).data)


def _open(data: bytes) -> Source:
    """The samples of a second, the length in seconds by the header (0: unknown), and parts of one channel."""
    is_wave = (data[:4], data[8:12]) == (b"RIFF", b"WAVE")
    has_frames = data[:1] == b"\xff" and data[1:2] > b"\xe0"
    if is_wave or has_frames or data[:3] == b"ID3" or data[:4] == b"fLaC":
        return _decode_plain(data, "wav" if is_wave else "flac" if data[:4] == b"fLaC" else "mp3")
    if data[:4] in (b"OggS", b"\x1aE\xdf\xa3") or data[4:8] == b"ftyp":
        return _decode_container(data)
    raise MediaError(_UNREADABLE)


def _join(
    rate: int, declared: float, parts: Iterator[Samples], max_seconds: float, model_seconds: float
) -> Samples:
    """All parts, if they are no more than `max_seconds` and no less than `declared`. `model_seconds`: what
    the model takes, beyond which nothing is decoded."""
    if not 0 < rate <= MAX_RATE:
        raise MediaError(f"the audio has {rate} samples per second, more than {MAX_RATE}")
    found, count = [], 0
    while (length := max(declared, count / rate)) <= max_seconds:
        if length > model_seconds + _TORN:
            raise _make_refusal(length, model_seconds, "" if declared else "at least ")
        part = next(parts, None)
        if part is None:
            break
        found.append(part)
        count += len(part)
    else:
        raise MediaError(f"the audio is longer than media.audio_max_seconds ({max_seconds:g})")
    if not count:
        raise MediaError("the audio has no samples")
    if declared - count / rate > _TORN:
        text = f"the audio ends after {count / rate:.1f} of {declared:.1f} seconds"
        raise MediaError(f"{text}: the file is torn or damaged")
    return np.concatenate(found)


def _decode_plain(data: bytes, name: str) -> Source:
    """WAV, MP3 or FLAC."""
    import miniaudio

    info = getattr(miniaudio, f"{name}_get_info")(data)
    rate, channels = info.sample_rate, info.nchannels
    parts = miniaudio.stream_memory(data, nchannels=channels, sample_rate=rate, frames_to_read=1 << 16)
    frames = info.num_frames
    if name == "wav":  # of which miniaudio counts the frames that are there
        missing = int.from_bytes(data[4:8], "little") + 8 - len(data)
        frames += max(0, missing) // (info.sample_width * channels)
    declared = 0.0 if frames * channels >= _UNKNOWN else frames / rate
    # Of floats, some may be no numbers, which no sample of 16 bits would show.
    if name == "wav" and frames and info.sample_format == miniaudio.SampleFormat.FLOAT32:
        _check_finite(np.asarray(miniaudio.wav_read_f32(data).samples))
    return rate, declared, (mix_channels(np.array(part, np.int16).reshape(-1, channels)) for part in parts)


def _check_finite(samples: np.ndarray[Any, Any]) -> None:
    if not np.isfinite(samples).all():
        raise MediaError("the audio has samples that are not finite numbers")


def _decode_container(data: bytes) -> Source:
    """The first audio of an Ogg, MP4 or Matroska file."""
    try:
        import av
    except ImportError as error:
        hint = "pip install 'mlxrun[audio]'"
        raise MediaError(f"Ogg, M4A and WebM need PyAV, which cannot be imported: {error}; {hint}") from error

    container = av.open(io.BytesIO(data), options=_CONTAINERS)
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise MediaError("the file has no audio")
    declared = float((stream.duration or 0) * (stream.time_base or 0))
    if not declared and len(container.streams) == 1:  # else it may be that of a video
        declared = (container.duration or 0) / av.time_base
    frames = container.decode(stream)
    first = next(frames, None)
    if first is None:
        raise MediaError("the audio has no samples")

    def convert() -> Iterator[Samples]:
        convert_frame = av.AudioResampler("s16", first.layout, first.rate).resample
        for frame in chain([first], frames, [None]):  # None: what the converter still holds
            if frame is not None and frame.format.name.startswith(("flt", "dbl")):
                _check_finite(frame.to_ndarray())
            for made in convert_frame(frame):
                yield mix_channels(made.to_ndarray().reshape(-1, len(first.layout.channels)))

    return first.rate, declared, convert()


def mix_channels(samples: np.ndarray[Any, np.dtype[np.int16]]) -> Samples:
    """The mean of all channels of samples [n, channels]."""
    scaled = samples.astype(np.float32) / np.float32(_FULL_SCALE)
    mixed: Samples = scaled.mean(axis=1)
    return mixed


if __name__ == "__main__":
    run_child(read_file)
