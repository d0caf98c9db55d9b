"""Loads the model of a config, and chooses how it is computed. It must run on the thread that will step the
engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.footprint import choose_quantization
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.choose import choose_methods
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.lora import check_adapters, separate_adapters
from mlxrun.model.run.compute_methods import LIBRARY_CHUNK, ComputeMethods
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller, run_trial_forward
from mlxrun.model.sparse.build import add_position_check, make_positioned
from mlxrun.model.sparse.explicit_positions import PositionedModelCaller


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that generates. `config`: without settings that the model cannot follow, so that the prefix
    cache's fingerprint has the actual choice. `cache`: caches [1, ...] that hold a few tokens; `vocab`: width
    of its logits."""

    config: Config
    info: LoadedModelInfo
    caller: ModelCaller
    load_check: LoadCheckReport
    snapshots: SnapshotCodec
    cache: Sequence[Any]
    vocab: int

    @property
    def methods(self) -> ComputeMethods:
        """How the model is computed."""
        return self.load_check.methods


def load_model(
    config: Config, info: LoadedModelInfo, load_check: LoadCheckReport | None = None
) -> LoadedModel:
    """Load the model. Raises ModelLoadError or ConfigError. `load_check`: its report, if it was already
    compared."""
    caller = load_caller(config, info)
    hooks = caller.hooks
    if config.prefill.sparse != "off":
        caller = make_positioned(caller)
    form: Literal["always", "never"] = "always" if caller.weights.held else "never"
    config = replace(config, model=replace(config.model, dequantize=form))
    cache, vocab = run_trial_forward(caller)
    check_adapters(caller)
    snapshots = SnapshotCodec(cache, config.cache.stored_bits)
    if snapshots.problem is not None:
        config = replace(config, cache=replace(config.cache, backend="none"))
    quantization = choose_quantization(config.cache, cache)
    if load_check is not None and isinstance(caller, VisionModelCaller):
        caller.follow(load_check.refused, load_check.features_cached)
    load_check = load_check or choose_methods(caller, vocab, config, info, quantization)
    caller.attention = load_check.methods.attention
    info.refused_media.update({kind: why for kind, why in load_check.refused.items() if why})
    load_check = replace(load_check, methods=separate_adapters(caller, load_check.methods), hooks=hooks)
    config = _follow_load_check(config, load_check.methods)
    if isinstance(caller, PositionedModelCaller):
        load_check = add_position_check(load_check, caller, vocab)
    return LoadedModel(config, info, caller, load_check, snapshots, cache, vocab)


def _follow_load_check(config: Config, methods: ComputeMethods) -> Config:
    """The config without what this model cannot do exactly. ConfigError if rows cannot be quantized."""
    if methods.quantization is not None and methods.decode != "ragged":
        raise ConfigError("cache.kv_bits: rows with different adapters decode one by one for this model")
    if not methods.snapshots:
        config = replace(config, cache=replace(config.cache, backend="none"))
    if methods.library_chunks:
        budget = max(config.scheduler.prefill_budget, LIBRARY_CHUNK)
        scheduler = replace(config.scheduler, chunk=LIBRARY_CHUNK, prefill_budget=budget)
        config = replace(config, scheduler=replace(scheduler, prefill_budget_busy=LIBRARY_CHUNK))
    return config
