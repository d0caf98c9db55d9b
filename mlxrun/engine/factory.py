"""From a config to a running engine: loads the model, probes it, and puts the parts together.

To be called on the thread that will step the engine: MLX's streams belong to threads.
"""

from __future__ import annotations

import logging

from mlxrun.config.settings import Config
from mlxrun.engine.cache_factory import make_prefixes
from mlxrun.engine.engine import Engine
from mlxrun.errors import ConfigError
from mlxrun.model.adapter import first_look
from mlxrun.model.footprint import budget
from mlxrun.model.loader import load_adapter
from mlxrun.model.machine.device import pace, resolve
from mlxrun.model.model_info import LoadedModelInfo, load_host
from mlxrun.model.probe import choose_methods
from mlxrun.model.runner import ModelRunner
from mlxrun.model.snapshot.snapshots import SnapshotCodec
from mlxrun.scheduler.memory_budget import RequestLimits
from mlxrun.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


def build_engine(config: Config, host: LoadedModelInfo | None = None) -> Engine:
    """An idle engine for this config. ModelLoadError if the model cannot be loaded. `host`: if loaded."""
    cut = pace(config)
    config = resolve(config)
    host = host or load_host(config.model, weights=True)
    reproducible = config.engine.reproducible
    adapter = load_adapter(config.model, host, config.cache.image_bytes, whole_sets=reproducible)
    cache, vocab = first_look(adapter)
    probe = choose_methods(adapter, vocab, config)
    memory = budget(config.scheduler, adapter.model, _hidden(host), cache, vocab)
    if 0 < memory.limit < memory.weights:
        raise ConfigError(f"scheduler.memory_limit: {memory.explain(1, 1)}: nothing could ever run")
    snapshots = SnapshotCodec(cache, config.cache.stored_bits)
    prefixes = make_prefixes(config, host, snapshots, memory)
    scheduler = Scheduler(
        config.scheduler,
        RequestLimits(host.context_length, memory),
        prefixes=prefixes,
        whole_chunks=reproducible,
        pace=cut,
    )
    log.info("loaded %s: decode %s", host.name, probe.methods.decode)
    runner = ModelRunner(adapter, vocab, probe.methods, snapshots)
    return Engine(host, scheduler, runner, config.engine, probe, prefixes)


def _hidden(host: LoadedModelInfo) -> int:
    """Width of the model; a guess where its config does not say."""
    text = host.config.get("text_config") or {}
    for source in (text, host.config):
        for key in ("hidden_size", "d_model", "n_embd", "dim"):
            if isinstance(source.get(key), int):
                return int(source[key])
    return 4096
