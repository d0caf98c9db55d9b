"""Loads the sound that a request wants transcribed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from mlxrun.api.text.media.audio_process import Samples, read_audio
from mlxrun.api.text.media.images import MediaLoader, get_image_memory, name_errors
from mlxrun.api.text.media.media_kinds import AUDIO, MediaRef
from mlxrun.config.media_settings import get_image_bytes
from mlxrun.config.settings import Config
from mlxrun.core.workers import AUDIO_FILES

_SPECTRUM = 1.5  # times the bytes of samples that samples and their spectrum take


@asynccontextmanager
async def load_recording(
    url: str, param: str, rate: int, loader: MediaLoader, config: Config, data: bytes | None = None
) -> AsyncIterator[Samples]:
    """Load a sound as float32 samples, `rate` a second, for use within the block. Until its end, its memory
    counts in media.memory_bytes.

    `data`: the bytes of the file, None to read them from `url`; `param`: the field that has it. MediaError
    if it cannot be read."""
    most = get_image_bytes(config.media.memory_bytes, config.scheduler.memory_limit)
    async with AsyncExitStack() as held:
        if data is None:
            with name_errors(MediaRef(url, param, AUDIO)):
                data = await loader.read(url, AUDIO)
        async with loader.slots:  # also while it waits for memory: few wait with samples that do not count
            with name_errors(MediaRef(url, param, AUDIO)):
                AUDIO.find_limit(config.media, "max_bytes").check(len(data))
                samples = await AUDIO_FILES.run(read_audio, data, rate, config.media)
            size = min(most, int(samples.nbytes * _SPECTRUM))
            await held.enter_async_context(get_image_memory(most).hold(size))
        yield samples
