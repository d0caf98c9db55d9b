"""Audio of requests: the samples are the library's, and what is refused is refused in words."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxrun.api.text.media import audio_process
from mlxrun.api.text.media.audio_process import read_audio
from mlxrun.config.media_settings import MediaSettings
from mlxrun.core.errors import MediaError
from tests.helpers.audio_files import make_audio, make_tone, make_wav
from tests.helpers.video_files import make_video

SETTINGS = MediaSettings()
RATE = 16_000


def refuse(data: bytes, settings: MediaSettings = SETTINGS) -> str:
    with pytest.raises(MediaError) as caught:
        read_audio(data, RATE, settings)
    return str(caught.value)


def read_here(data: bytes) -> np.ndarray:
    """What the child would write, without a child."""
    target = io.BytesIO()
    audio_process.read_file(data, target, str(RATE), "600")
    return np.frombuffer(target.getvalue()[8:], np.float32)


def read_by_library(data: bytes, kind: str, folder: Path) -> np.ndarray:
    from mlx_vlm.utils import load_audio

    path = folder / f"sound.{kind}"
    path.write_bytes(data)
    return np.asarray(load_audio(str(path), sr=RATE))


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1), (48_000, 2)])
@pytest.mark.parametrize("kind", ["wav", "mp3", "flac"])
def test_samples_are_those_of_the_library(kind: str, rate: int, channels: int, tmp_path: Path) -> None:
    data = make_audio(kind, 0.5, rate, channels)
    assert np.array_equal(read_here(data), read_by_library(data, kind, tmp_path))


def test_the_library_sees_channels_that_are_mixed_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation twin: only the first channel is read."""
    monkeypatch.setattr(
        audio_process, "mix_channels", lambda samples: (samples[:, 0] / 32768).astype(np.float32)
    )
    data = make_audio("wav", 0.5, 44_100, 2)
    assert not np.array_equal(read_here(data), read_by_library(data, "wav", tmp_path))


@pytest.mark.parametrize("kind", ["ogg", "m4a", "webm"])
def test_other_containers_give_the_tone(kind: str) -> None:
    """The library reads them with the program `ffmpeg`, which is not everywhere."""
    found = read_here(make_audio(kind, 0.5, 48_000, 2))
    expected = make_tone(0.5, RATE).mean(axis=1) * 0.75 / 32768
    assert abs(len(found) - len(expected)) < 0.1 * RATE
    spectrum = np.abs(np.fft.rfft(found * np.hanning(len(found))))
    assert abs(np.fft.rfftfreq(len(found), 1 / RATE)[spectrum.argmax()] - 440) < 5
    assert 0.8 < found.std() / expected.std() < 1.2


def test_a_process_reads_it() -> None:
    data = make_audio("wav")
    assert np.array_equal(read_audio(data, RATE, SETTINGS), read_here(data))


@pytest.mark.parametrize(
    ("make_data", "reason"),
    [
        (bytes, "not readable audio"),
        (lambda: b"hello, world", "not readable audio"),
        (lambda: make_audio("flac")[:40], "audio"),
        (lambda: make_audio("m4a")[:200], "not readable audio"),
        (lambda: make_audio("ogg")[:100], "not readable audio"),
        (lambda: make_wav(make_tone()[:0]), "the audio has no samples"),
        (
            lambda: make_wav(make_tone(1.0))[:-16_000],
            "the audio ends after 0.5 of 1.0 seconds: the file is torn",
        ),
        (lambda: make_audio("flac", 2.0)[:-4_000], "the file is torn or damaged"),
        (lambda: make_audio("mka", rate=1_000_000), "samples per second, more than 384000"),
        (lambda: make_video(kind="mp4"), "the file has no audio"),
        (lambda: make_audio("webm", 2.0)[:-6_000], "the file is torn or damaged"),
        (lambda: make_audio("flac", 601, 4_000), "the audio is longer than media.audio_max_seconds"),
        (lambda: make_audio("webm", 601, 8_000), "the audio is longer than media.audio_max_seconds"),
        (lambda: b"ID3" + bytes(3000), "not readable audio"),
        (lambda: b"\xff\xfb" * 2000, "audio"),
    ],
    ids=range(15),
)
def test_what_cannot_be_read_is_refused_in_words(make_data: Callable[[], bytes], reason: str) -> None:
    target = io.BytesIO()
    with pytest.raises(MediaError, match=reason):
        audio_process.read_file(make_data(), target, str(RATE), "600")
    assert not target.getvalue()


def test_the_length_is_limited() -> None:
    data = make_audio("flac", 3.0)
    assert refuse(data, replace(SETTINGS, audio_max_seconds=2.0)) == (
        "the audio is longer than media.audio_max_seconds (2)"
    )


def test_no_more_is_decoded_than_the_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the header says, or as soon as too much was decoded."""
    counted: list[int] = []
    original = audio_process.mix_channels
    monkeypatch.setattr(
        audio_process,
        "mix_channels",
        lambda samples: counted.append(len(samples)) or original(samples),
    )
    tone = make_tone(30.0)
    unknown = make_wav(tone, declared=0xFFFFFFFF)
    for data, said, most in (
        (make_wav(tone), "the audio has 30.0 seconds", 0),
        (unknown, "the audio has at least 4.1 seconds", 5 * RATE),
    ):
        counted.clear()
        with pytest.raises(MediaError, match=f"^{said}, and the model takes at most 1$"):
            audio_process.read_file(data, io.BytesIO(), str(RATE), "600", str(RATE))
        assert sum(counted) <= most
    assert len(read_here(make_wav(make_tone(1.2)))) > RATE


def test_a_stream_without_a_length_is_read() -> None:
    """A program that writes a WAV to a pipe does not know its length."""
    tone = make_tone()
    assert len(read_here(make_wav(tone, declared=0xFFFFFFFF))) == len(tone)


def test_a_description_of_other_files_is_no_audio() -> None:
    assert "not readable audio" in refuse(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")


@pytest.mark.parametrize("kind", ["wav", "mka"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers_are_refused(kind: str, value: float) -> None:
    samples = np.zeros(RATE, np.float32)
    assert len(read_here(make_floats(kind, samples))) == RATE
    samples[100] = value
    assert refuse(make_floats(kind, samples)) == "the audio has samples that are not finite numbers"


def make_floats(kind: str, samples: np.ndarray) -> bytes:
    """A file of floats, one channel."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format={"mka": "matroska"}.get(kind, kind)) as container:
        stream = container.add_stream("pcm_f32le", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="flt", layout="mono")
        frame.sample_rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return target.getvalue()
