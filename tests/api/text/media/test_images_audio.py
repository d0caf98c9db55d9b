"""Audio of requests as it is loaded: its limits, and the errors that name it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.api.text.media import images, media_sources
from mlxrun.api.text.media.audio_process import KEPT_BYTES, DecodedAudio
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.media_kinds import AUDIO, MediaRef
from mlxrun.config.media_settings import Audio, AudioSampling, MediaSettings
from mlxrun.core.errors import MediaError
from tests.helpers.audio_files import audio_url, make_audio
from tests.helpers.raw_clients import until
from tests.helpers.tokenizers import FakeModelInfo

RATE = 16_000
MODEL: Any = FakeModelInfo(vision=True, audio_sampling=AudioSampling(RATE, max_samples=RATE))
MEMO = MediaRef(audio_url(make_audio("wav", 0.5, 8_000)), "p", AUDIO)


async def load(*refs: MediaRef, base: Path | None = None, **options: Any) -> list[Any]:
    memory = options.pop("memory", 10**9)
    loader = MediaLoader(MediaSettings(**options), base, memory_bytes=memory)
    async with loader.load_images(refs, MODEL) as loaded:
        return list(loaded)


async def test_data_and_a_path_give_the_models_samples(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_bytes(make_audio("flac", 0.5, 8_000))
    found = await load(MEMO, MediaRef("a.flac", "q", AUDIO), base=tmp_path)
    assert all(isinstance(each, Audio) and each.rate == RATE for each in found)
    assert len(found[0].samples) == RATE // 2 and np.array_equal(found[0].samples, found[1].samples)


async def test_files_of_videos_and_untyped_ones_are_heard() -> None:
    """Clients name a WebM with sound only as a video."""
    for kind, mime in (("webm", "video/webm"), ("wav", "application/octet-stream"), ("mp3", "")):
        data = audio_url(make_audio(kind)).partition(",")[2]
        (found,) = await load(MediaRef(f"data:{mime};base64,{data}", "p", AUDIO))
        assert len(found.samples) >= RATE // 2


@pytest.mark.parametrize(
    ("refs", "options", "said"),
    [
        ([MEMO, MEMO], {"max_audio": 1}, r"p: 2 audio parts are more than media\.max_audio \(1\)"),
        ([MEMO], {"audio_max_bytes": 99}, r"p: it has more than media\.audio_max_bytes \(99\)"),
        (
            [MEMO],
            {"audio_max_seconds": 0.4},
            r"p: the audio is longer than media\.audio_max_seconds \(0\.4\)",
        ),
        ([MEMO], {"memory": KEPT_BYTES * 100}, r"p: .* more than media\.memory_bytes"),
        (
            [MediaRef(audio_url(make_audio("wav", 1.5)), "p", AUDIO)],
            {},
            "p: the audio has 1.5 seconds, and the model takes at most 1",
        ),
        ([MediaRef(audio_url(b"hm"), "p", AUDIO)], {}, "p: not readable audio"),
        ([MediaRef("data:image/png;base64,AAAA", "p", AUDIO)], {}, r"p: expected data:audio/\.\.\.;base64"),
        ([MediaRef("a.wav", "p", AUDIO)], {}, "p: file paths are not supported"),
        *(
            (
                [MediaRef(audio_url(make_audio(kind)).partition(",")[2], "p", AUDIO)],
                {},
                "p: it is base64 without its beginning",
            )
            for kind in ("wav", "mp3", "flac", "ogg", "m4a", "webm")
        ),
    ],
)
async def test_what_is_refused(refs: list[MediaRef], options: dict[str, Any], said: str) -> None:
    with pytest.raises(MediaError, match=f"^{said}") as caught:
        await load(*refs, **options)
    assert (caught.value.code, caught.value.param) == ("invalid_audio", "p")


async def test_few_requests_wait_for_memory_with_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not decoded yet: their samples would count nowhere. Images do not wait behind them."""
    decoded: list[int] = []

    def decode(data: bytes, sampling: AudioSampling, settings: MediaSettings) -> DecodedAudio:
        decoded.append(1)
        return DecodedAudio(Audio(np.zeros(RATE, np.float32), RATE))

    monkeypatch.setattr(images, "load_audio", decode)
    loader = MediaLoader(MediaSettings(), None, memory_bytes=KEPT_BYTES * RATE, parallel=2)
    done = asyncio.Event()

    async def request() -> None:
        async with loader.load_images([MEMO], MODEL):
            await done.wait()

    tasks = [asyncio.create_task(request()) for _ in range(9)]
    await until(lambda: len(decoded) >= 3)
    for _ in range(200):
        await asyncio.sleep(0.001)
    assert len(decoded) == 3  # one that has memory, and two that wait for it
    done.set()
    await asyncio.gather(*tasks)
    assert len(decoded) == 9


async def test_slow_downloads_do_not_hold_up_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests download as may decode at a time, and one of them has a sound here."""
    end, running = asyncio.Event(), list[str]()

    async def fetch(url: str, *_: Any) -> bytes:
        running.append(url)
        await end.wait()
        return make_audio("wav", 0.5, 8_000)

    monkeypatch.setattr(media_sources, "fetch_media", fetch)
    loader = MediaLoader(MediaSettings(allow_urls=True), None, parallel=2)

    async def request(*refs: MediaRef) -> int:
        async with loader.load_images(refs, MODEL) as found:
            return len(found)

    slow = [MediaRef(f"https://example.com/{at}.wav", "p", AUDIO) for at in range(3)]
    tasks = [asyncio.create_task(request(*refs)) for refs in ((slow[0], MEMO), (slow[1],), (slow[2],))]
    await until(lambda: len(running) == 3)
    async with asyncio.timeout(60):
        assert await request(MEMO) == 1
    assert not any(task.done() for task in tasks)
    end.set()
    assert await asyncio.gather(*tasks) == [2, 1, 1]


async def test_many_sounds_of_a_request_let_others_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later is decoded before the last of them."""
    order: list[float] = []

    def decode(data: bytes, sampling: AudioSampling, settings: MediaSettings) -> DecodedAudio:
        time.sleep(0.02)  # the other request is there meanwhile
        order.append(len(data))
        return DecodedAudio(Audio(np.zeros(1, np.float32), RATE))

    monkeypatch.setattr(images, "load_audio", decode)
    loader = MediaLoader(MediaSettings(max_audio=20), None)
    other = MediaRef(audio_url(b"other"), "q", AUDIO)

    async def request(*refs: MediaRef) -> None:
        async with loader.load_images(refs, MODEL):
            pass

    await asyncio.gather(request(*[MEMO] * 20), request(other))
    assert len(order) == 21 and order.index(len(b"other")) < 15


async def test_no_more_sounds_are_decoded_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []

    def decode(data: bytes, sampling: AudioSampling, settings: MediaSettings) -> DecodedAudio:
        decoded.append(1)
        return DecodedAudio(Audio(np.zeros(RATE, np.float32), RATE))

    monkeypatch.setattr(images, "load_audio", decode)
    with pytest.raises(MediaError, match=r"p: the audio before it needs more than media\.memory_bytes"):
        await load(*[MEMO] * 100, max_audio=100, memory=2 * KEPT_BYTES * RATE)
    assert len(decoded) < 10


def test_nothing_keeps_results_beside_an_error() -> None:
    """Samples of other requests would stay until Python collects garbage."""

    class Result:
        """What is decoded."""

    kept: list[weakref.ref[Result]] = []

    async def decode() -> Result:
        kept.append(weakref.ref(result := Result()))
        return result

    async def fail() -> Result:
        raise MediaError("broken")

    async def run() -> None:
        with contextlib.suppress(MediaError):
            await images._gather([decode(), fail()])

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
        assert kept[0]() is None
    finally:
        gc.enable()
