"""Audio of requests as it is loaded: its limits, and the errors that name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxrun.api.text.media.audio_process import KEPT_BYTES
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.media_kinds import AUDIO, MediaRef
from mlxrun.config.media_settings import Audio, AudioSampling, MediaSettings
from mlxrun.core.errors import MediaError
from tests.helpers.audio_files import audio_url, make_audio
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


@pytest.mark.parametrize(
    ("refs", "options", "said"),
    [
        ([MEMO, MEMO], {"max_audio": 1}, r"p: 2 audio are more than media\.max_audio \(1\)"),
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
    ],
)
async def test_what_is_refused(refs: list[MediaRef], options: dict[str, Any], said: str) -> None:
    with pytest.raises(MediaError, match=f"^{said}") as caught:
        await load(*refs, **options)
    assert (caught.value.code, caught.value.param) == ("invalid_audio", "p")
