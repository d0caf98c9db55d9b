"""Loads the model of a config, and chooses how it is computed. It must run on the thread that will step the
engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlxrun.config.settings import Config
from mlxrun.core import cache_home
from mlxrun.core.errors import ConfigError
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.footprint import choose_quantization
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load_check.choose import choose_methods, follow_report
from mlxrun.model.load_check.kept_verdicts import KeptVerdict, VerdictFile, describe_form
from mlxrun.model.load_check.lora_checks import check_adapters, separate_adapters
from mlxrun.model.load_check.recheck import Recheck
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.load_check.verdict_key import compute_key
from mlxrun.model.run.compute_methods import LIBRARY_CHUNK, ComputeMethods
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from mlxrun.model.sparse.build import add_position_check, make_positioned
from mlxrun.model.sparse.explicit_positions import PositionedModelCaller

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that generates. `config`: without settings that the model cannot follow, so that the prefix
    cache's fingerprint has the actual choice. `cache`: caches [1, ...] that hold a few tokens; `vocab`: width
    of its logits. `recheck`: the comparison that is left to do while the engine is idle."""

    config: Config
    info: LoadedModelInfo
    caller: ModelCaller
    load_check: LoadCheckReport
    snapshots: SnapshotCodec
    cache: Sequence[Any]
    vocab: int
    recheck: Recheck | None = None

    @property
    def methods(self) -> ComputeMethods:
        """How the model is computed."""
        return self.load_check.methods


def load_model(
    config: Config, info: LoadedModelInfo, load_check: LoadCheckReport | None = None
) -> LoadedModel:
    """Load the model. Raises ModelLoadError or ConfigError. `load_check`: its report, if it was already
    compared."""
    file = open_verdict(config, info) if load_check is None else None
    kept = None if file is None else file.read()
    caller = load_caller(config, info, None if kept is None else kept.seconds)
    weights = describe_form(caller.weights)
    if kept is not None and kept.form != weights:
        kept = None
    hooks = caller.hooks
    if config.prefill.sparse != "off":
        caller = make_positioned(caller)
    form: Literal["always", "never"] = "always" if caller.weights.held else "never"
    config = replace(config, model=replace(config.model, dequantize=form))
    cache, vocab = run_trial_forward(caller, known=kept is not None)
    check_adapters(caller)
    snapshots = SnapshotCodec(cache, config.cache.stored_bits)
    if snapshots.problem is not None:
        config = replace(config, cache=replace(config.cache, backend="none"))
    compared = (vocab, config, info, choose_quantization(config.cache, cache))
    known = kept.report if kept is not None else load_check
    if known is not None:
        load_check = follow_report(caller, known)
    else:
        if config.engine.load_check:
            once = "" if file is None else ", once for these files and settings"
            log.info("comparing %s with its library%s", info.name, once)
        load_check = choose_methods(caller, *compared)
        if file is not None:
            file.write(KeptVerdict(weights, caller.weights.seconds, load_check))
    recheck = None
    if file is not None and kept is not None:
        limit = config.scheduler.memory_limit
        recheck = Recheck(caller, lambda own: choose_methods(own, *compared), kept, file, limit)
    caller.attention = load_check.methods.attention
    caller.fused_prompts = load_check.methods.fused_prompts
    info.refused_media.update({kind: why for kind, why in load_check.refused.items() if why})
    load_check = replace(load_check, methods=separate_adapters(caller, load_check.methods), hooks=hooks)
    config = _follow_load_check(config, load_check.methods)
    if isinstance(caller, PositionedModelCaller):
        load_check = add_position_check(load_check, caller, vocab)
    return LoadedModel(config, info, caller, load_check, snapshots, cache, vocab, recheck)


def open_verdict(config: Config, info: LoadedModelInfo) -> VerdictFile | None:
    """The file of the model's verdict; None if none is used."""
    if config.engine.load_check != "cached" or not cache_home.KEPT_DAYS:
        return None
    try:
        return VerdictFile(compute_key(config, info))
    except (OSError, RuntimeError) as error:  # a file cannot be read, or the home folder is unknown
        log.debug("load check: no verdict is kept: %s", error)
        return None


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
