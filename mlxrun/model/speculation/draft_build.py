"""Makes a draft source of the model of `model.draft`."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.memory_budget import Footprint
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind, list_all_arrays
from mlxrun.model.load.draft_loading import SmallModel
from mlxrun.model.load.footprint import (
    ACTIVATION_FACTOR,
    count_weight_bytes,
    measure_footprint,
    read_hidden_size,
)
from mlxrun.model.machine.device import uses_gpu
from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.speculation.draft_model import MAX_READ, DraftModel
from mlxrun.model.speculation.support import MIN_COST, time_step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """`nbytes`: of its weights and of a slice of a prompt; `footprint`: of a row in it."""

    small: SmallModel
    source: DraftModel
    nbytes: int
    footprint: Footprint

    def describe(self) -> str:
        """What it takes, for an error that a user can act on."""
        return f"{format_rounded(self.nbytes)} of the weights are model.draft"


def make_draft_model(
    config: Config, small: SmallModel, target: Adapter, vocab: int, methods: ComputeMethods
) -> LoadedDraftModel:
    """The model of `model.draft` as a source of drafts for `target`, whose logits are `vocab` wide and which
    decodes by these methods, in pages. ConfigError if it does not fit."""
    kinds = {get_kind(layer) for layer in flatten_caches(small.cache)}
    if not kinds <= {LayerKind.KV, LayerKind.WINDOW}:
        raise small.make_error("cannot draft: it has caches of another kind than keys and values")
    own, seconds = _choose_decode(small, methods)
    cost = max(seconds / time_step(target, methods), MIN_COST)
    log.info("%s drafts; a token of it costs %.2f of a step", small.info.name, cost)
    batch = make_decode_batch(small.cache, own)
    assert isinstance(batch, PagedDecodeBatch)
    source = DraftModel(
        small.adapter,
        vocab,
        batch,
        cost=cost,
        context=small.info.context_length,
        max_tokens=config.speculation.max_tokens,
        launch_first=methods.launch_first,
    )
    itemsize = max(array.itemsize for array in list_all_arrays(small.cache))
    read = MAX_READ * read_hidden_size(small.info.config) * itemsize * ACTIVATION_FACTOR
    nbytes = count_weight_bytes(small.adapter.model) + read
    return LoadedDraftModel(small, source, nbytes, measure_footprint(small.cache))


def _choose_decode(small: SmallModel, methods: ComputeMethods) -> tuple[ComputeMethods, float]:
    """How the draft model decodes, beside a target that decodes by these methods, and the seconds of a step:
    compiled on a GPU, also where the target cannot be. ConfigError if it cannot."""
    own = replace(methods, fixed_width=0, quantization=None)
    if uses_gpu():
        own = replace(own, decode="compiled")
    problem: Exception | None = None
    for chosen in (own, replace(own, decode="paged")):
        try:
            return chosen, time_step(small.adapter, chosen)
        except Exception as error:  # a library may raise anything for what it was not made for
            problem = problem or error
    raise small.make_error(f"cannot draft: {problem}") from problem
