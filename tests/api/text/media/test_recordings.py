from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from mlxrun.api.text.media.images import MediaLoader, get_image_memory
from mlxrun.api.text.media.recordings import load_recording
from mlxrun.config.settings import Config, MediaSettings
from mlxrun.core.errors import MediaError
from tests.helpers.audio_files import audio_url, make_tone, make_wav
from tests.helpers.raw_clients import until

SOUND = make_wav(make_tone(0.25))


def make_context(base: Path | None = None, **media: int) -> tuple[MediaLoader, Config]:
    config = Config(media=MediaSettings(**media))
    return MediaLoader(config.media, base), config


async def test_bytes_paths_and_data_urls_give_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(SOUND)
    context = make_context(tmp_path)
    found = []
    for url, data in (("", SOUND), ("a.wav", None), (audio_url(SOUND), None)):
        async with load_recording(url, "file", 16_000, *context, data) as samples:
            found.append(samples)
    assert found[0].shape == (4000,)
    assert all(np.array_equal(found[0], each) for each in found)


async def test_its_memory_counts_within_the_block() -> None:
    context = make_context(memory_bytes=40_000)  # of which one takes 24,000
    order = []

    async def load(name: str, leave: asyncio.Event) -> None:
        async with load_recording("", "file", 16_000, *context, SOUND):
            order.append(name)
            await leave.wait()

    leave = asyncio.Event()
    first = asyncio.create_task(load("first", leave))
    await until(lambda: order)
    assert get_image_memory(40_000).used == 24_000
    second = asyncio.create_task(load("second", leave))
    await asyncio.sleep(0.3)
    assert order == ["first"]
    leave.set()
    await asyncio.gather(first, second)
    assert order == ["first", "second"]
    assert get_image_memory(40_000).used == 0


@pytest.mark.parametrize(
    ("url", "data", "text"),
    [
        ("gone.wav", None, "file: 'gone.wav' does not exist"),
        ("", b"no sound", "file: not readable audio"),
        ("", SOUND + bytes(9000), r"file: it has more than media.audio_max_bytes \(9000\)"),
    ],
)
async def test_what_cannot_be_read_is_named(tmp_path: Path, url: str, data: bytes | None, text: str) -> None:
    context = make_context(tmp_path, audio_max_bytes=9000)
    with pytest.raises(MediaError, match=text) as caught:
        async with load_recording(url, "file", 16_000, *context, data):
            pass
    assert (caught.value.param, caught.value.code) == ("file", "invalid_audio")
