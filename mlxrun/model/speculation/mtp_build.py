"""Makes a draft source of the prediction head in a model's checkpoint, and measures what its drafts cost."""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.memory_budget import Footprint
from mlxrun.model.hooks.weight_form import settle_weights
from mlxrun.model.load.footprint import count_weight_bytes, measure_footprint
from mlxrun.model.load.model_files import find_draft_folder, read_json
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.hidden_tap import HiddenTap, find_hidden_tap
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.speculation.mtp_head import find_mtp_head, load_mtp_head
from mlxrun.model.speculation.mtp_rows import PLACES, MTPRows
from mlxrun.model.speculation.mtp_source import MTPSource
from mlxrun.model.speculation.support import MIN_COST, time_step

log = logging.getLogger(__name__)
TIMED_DRAFTS, TIMED_DEPTH = 5, 4


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """`nbytes`: of its weights; `footprint`: of a row in it."""

    source: MTPSource
    nbytes: int
    footprint: Footprint

    def describe(self) -> str:
        """What it takes, for an error that a user can act on."""
        return f"{format_rounded(self.nbytes)} of the weights are the head that drafts (speculation.method)"


def load_mtp_source(
    config: Config, model_info: LoadedModelInfo, target: Adapter, vocab: int, methods: ComputeMethods
) -> LoadedHead | str:
    """The head in the checkpoint of `target`, or in `model.draft`; or why there is none. The target's logits
    are `vocab` wide, and it decodes by these methods, in pages. ModelLoadError if weights are missing."""
    split = None
    if config.model.draft is not None and config.prefill.sparse == "off":
        if not names_split_head(config.model):
            return f"model.draft {config.model.draft} is no head that was split off a checkpoint"
        split = find_draft_folder(config.model)
    found = find_mtp_head(model_info, split)
    if isinstance(found, str):
        return found
    tap = find_hidden_tap(target)
    embed = None if tap is None else find_embedding(tap.trunk)
    if tap is None or embed is None:
        return "the model's hidden states and embeddings were not found"
    hidden = _read_hidden(target, tap)
    head = load_mtp_head(model_info, found, hidden.dtype)
    if head.width != hidden.shape[-1]:
        return f"the head is for hidden states of {head.width} numbers, and the model has {hidden.shape[-1]}"
    settle_weights(head, config, hidden.dtype)
    source = MTPSource(
        target,
        tap,
        head,
        embed,
        vocab,
        max_tokens=config.speculation.max_tokens,
        launch_first=methods.launch_first,
        compiled=methods.decode == "compiled",
    )
    source.cost = max(_time_draft(source.rows, hidden) / time_step(target, methods), MIN_COST)
    log.info("the checkpoint's own head drafts; a token of it costs %.2f of a step", source.cost)
    size = measure_footprint([source.rows.cache])
    footprint = replace(size, per_token=0, windows=((PLACES, size.per_token),))
    return LoadedHead(source, count_weight_bytes(head), footprint)


def find_embedding(trunk: Any) -> Any:
    """The layer that embeds tokens; None if it is not known."""
    return getattr(trunk, "embed_tokens", None) or getattr(trunk, "embeddings", None)


def names_split_head(settings: ModelSettings) -> bool:
    """Whether `model.draft` is a head, which mlx-vlm has split off a checkpoint, and no model."""
    if settings.draft is None:
        return False
    config = read_json(find_draft_folder(settings) / "config.json")
    return str(config.get("model_type")).endswith("_mtp")


def _read_hidden(target: Adapter, tap: HiddenTap) -> mx.array:
    """The hidden state of one token, [1, D]."""
    ids, cache = mx.array([[1]]), target.make_cache()
    _, hidden = tap.record(lambda: target.prefill(ids, cache, 0, TEXT_ONLY, tap.model))
    return hidden[0]


def _time_draft(rows: MTPRows, hidden: mx.array) -> float:
    """Seconds of one more drafted token, for one row."""
    rows.read_step(["trial"], hidden, mx.array([1]))
    mx.eval(rows.list_arrays())
    seconds = []
    for _ in range(TIMED_DRAFTS):
        times = [time.perf_counter()]
        for depth in (1, 1 + TIMED_DEPTH):
            rows.draft({"trial": depth})
            times.append(time.perf_counter())
        seconds.append((times[2] - 2 * times[1] + times[0]) / TIMED_DEPTH)
    rows.reset()
    return statistics.median(seconds[1:])
