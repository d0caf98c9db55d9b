"""Loads the model of a config, and finds out how it is computed: everything that an engine asks of a model
before it has rows. Must be called on the thread that will step the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.footprint import choose_quantization
from mlxrun.model.load.loader import load_adapter
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.lora import check_adapters, separate_adapters
from mlxrun.model.probe.choose import choose_methods
from mlxrun.model.probe.report import ProbeReport
from mlxrun.model.run.adapter import Adapter, VisionAdapter, run_trial_forward
from mlxrun.model.run.compute_methods import LIBRARY_CHUNK, ComputeMethods
from mlxrun.model.sparse.build import add_position_check, make_positioned
from mlxrun.model.sparse.explicit_positions import PositionedAdapter


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that generates. `config`: without what it cannot do, so that the fingerprint of the prefix
    cache has what was chosen; `cache`: caches [1, ...] that hold a few tokens; `vocab`: width of its logits.
    """

    config: Config
    info: LoadedModelInfo
    adapter: Adapter
    probe: ProbeReport
    snapshots: SnapshotCodec
    cache: Sequence[Any]
    vocab: int

    @property
    def methods(self) -> ComputeMethods:
        """How it is computed."""
        return self.probe.methods


def load_model(config: Config, info: LoadedModelInfo, probe: ProbeReport | None = None) -> LoadedModel:
    """Raises ModelLoadError or ConfigError. `probe`: if this model was already compared."""
    adapter = load_adapter(config, info)
    hooks = adapter.hooks
    if config.prefill.sparse != "off":
        adapter = make_positioned(adapter)
    form: Literal["always", "never"] = "always" if adapter.weights.held else "never"
    config = replace(config, model=replace(config.model, dequantize=form))
    cache, vocab = run_trial_forward(adapter)
    check_adapters(adapter)
    snapshots = SnapshotCodec(cache, config.cache.stored_bits)
    if snapshots.problem is not None:
        config = replace(config, cache=replace(config.cache, backend="none"))
    quantization = choose_quantization(config.cache, cache)
    if probe is not None and isinstance(adapter, VisionAdapter):
        adapter.follow(probe.refused, probe.features_cached)
    probe = probe or choose_methods(adapter, vocab, config, info, quantization)
    adapter.attention = probe.methods.attention
    info.refused_media.update({kind: why for kind, why in probe.refused.items() if why})
    probe = replace(probe, methods=separate_adapters(adapter, probe.methods), hooks=hooks)
    config = _follow_probe(config, probe.methods)
    if isinstance(adapter, PositionedAdapter):
        probe = add_position_check(probe, adapter, vocab)
    return LoadedModel(config, info, adapter, probe, snapshots, cache, vocab)


def _follow_probe(config: Config, methods: ComputeMethods) -> Config:
    """The config without what this model cannot do exactly. ConfigError if rows cannot be quantised."""
    if methods.quantization is not None and methods.decode != "ragged":
        raise ConfigError("cache.kv_bits: rows with different adapters decode one by one for this model")
    if not methods.snapshots:
        config = replace(config, cache=replace(config.cache, backend="none"))
    if methods.library_chunks:
        budget = max(config.scheduler.prefill_budget, LIBRARY_CHUNK)
        scheduler = replace(config.scheduler, chunk=LIBRARY_CHUNK, prefill_budget=budget)
        config = replace(config, scheduler=replace(scheduler, prefill_budget_busy=LIBRARY_CHUNK))
    return config
