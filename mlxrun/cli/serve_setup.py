"""What a server loads: the model's part without weights, what prepares requests for it, and its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxrun.api.prepared import ApiContext
    from mlxrun.config.settings import Config
    from mlxrun.model.load.model_info import LoadedModelInfo
    from mlxrun.server.engine_state import LoadedEngine


async def load_engine(config: Config) -> LoadedEngine:
    """Load the model of a config on an engine of its own."""
    from mlxrun.engine.client import EngineClient
    from mlxrun.model.machine.device import describe_device
    from mlxrun.model.machine.versions import list_library_versions
    from mlxrun.server.engine_state import LoadedEngine

    model = await load_model(config, weights=True)
    context = make_context(config, model)
    client = await EngineClient.start(config, model)
    try:
        facts = {"versions": list_library_versions(), "device": describe_device(config.engine)}
        return LoadedEngine(client, context, facts)
    except BaseException:
        await client.close()
        raise


async def load_model(config: Config, *, weights: bool) -> LoadedModelInfo:
    """The model of a config, whose weights are loaded later; `weights`: they must be there."""
    import asyncio

    from mlxrun.cli.model_reading import read_model

    return await asyncio.to_thread(read_model, config.model, weights=weights)


def make_context(config: Config, model: LoadedModelInfo) -> ApiContext:
    """What turns request bodies into token ids for the model of a config."""
    from mlxrun.api.parsers.registry import detect_formats
    from mlxrun.api.prepared import ApiContext
    from mlxrun.api.text.media.images import MediaLoader
    from mlxrun.config.image_bytes import get_image_bytes

    formats = detect_formats(model.chat_template, model.tokenizer, config.parsers)
    image_bytes = get_image_bytes(config.media.memory_bytes, config.scheduler.memory_limit)
    loader = MediaLoader(config.media, None, memory_bytes=image_bytes)
    return ApiContext(model, config, loader, formats)
