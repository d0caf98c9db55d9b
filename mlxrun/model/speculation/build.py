"""Makes the source of a model's drafts: the model of `model.draft`, or the head in the model's checkpoint.

Steps are timed at load: the cost of a drafted token, and whether verifying more tokens takes longer.
"""

from __future__ import annotations

import logging
import statistics
import time
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.memory_budget import Footprint
from mlxrun.model.hooks.adapted_layers import BASE
from mlxrun.model.hooks.weight_form import settle_weights
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import KEYED, flatten_caches, get_kind, list_all_arrays
from mlxrun.model.load.footprint import (
    ACTIVATION_FACTOR,
    count_weight_bytes,
    measure_footprint,
    read_hidden_size,
)
from mlxrun.model.load.loader import SmallModel
from mlxrun.model.load.model_files import find_draft_folder, read_json
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.machine.device import uses_gpu, warm_device
from mlxrun.model.run.compute_methods import ComputeMethods, is_compiled, make_decode_batch, uses_pages
from mlxrun.model.run.hidden_hook import find_hidden_hook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.speculation.draft_model import MAX_READ, DraftModel
from mlxrun.model.speculation.mtp_head import find_mtp_head, load_mtp_head
from mlxrun.model.speculation.mtp_rows import PLACES, MTPRows
from mlxrun.model.speculation.mtp_source import MTPSource

log = logging.getLogger(__name__)
TIMED_STEPS = 5
TIMED_DRAFTS, TIMED_DEPTH = 5, 4
MIN_COST = 0.01  # of a drafted token, in steps


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """`nbytes`: of its weights, and of a slice of a prompt in a draft model; `footprint`: of a row in it;
    `note`: which weights these are, for an error that a user can act on; `small`: the draft model."""

    source: DraftModel | MTPSource
    nbytes: int
    footprint: Footprint
    note: str
    small: SmallModel | None = None

    def describe(self) -> str:
        """The memory that it takes."""
        return f"{format_rounded(self.nbytes)} of the weights are {self.note}"


def find_device_problem() -> str | None:
    """Why no model drafts on this device; None if some may."""
    return None if uses_gpu() else "drafts need decoding by pages, which is for GPUs, and this is a CPU"


def find_draft_problem(methods: ComputeMethods) -> str | None:
    """Why a model with these methods does not draft; None if it can."""
    if not uses_pages(methods.decode):
        return f"drafts need decoding by pages, which is for GPUs; this model decodes {methods.decode}"
    return methods.draft_problem or None


def make_draft_model(
    config: Config, small: SmallModel, target: ModelCaller, vocab: int, methods: ComputeMethods
) -> LoadedSource:
    """The draft model `small` as a source of drafts. `target`: has logits of width `vocab` and decodes by
    `methods`, in pages. ConfigError if it does not fit."""
    kinds = {get_kind(layer) for layer in flatten_caches(small.cache)}
    if not kinds <= KEYED:
        raise small.make_error("cannot draft: it has caches of another kind than keys and values")
    own, seconds = _choose_decode(small, methods)
    cost = max(seconds / time_step(target, methods), MIN_COST)
    log.info("%s drafts; a token of it costs %.2f of a step", small.info.name, cost)
    batch = make_decode_batch(small.cache, own)
    assert isinstance(batch, PagedDecodeBatch)
    source = DraftModel(
        small.caller,
        vocab,
        batch,
        cost=cost,
        context=small.info.context_length,
        max_tokens=config.speculation.max_tokens,
        launch_first=methods.launch_first,
    )
    itemsize = max(array.itemsize for array in list_all_arrays(small.cache))
    read = MAX_READ * read_hidden_size(small.info.config) * itemsize * ACTIVATION_FACTOR
    nbytes = count_weight_bytes(small.caller.model) + read
    return LoadedSource(source, nbytes, measure_footprint(small.cache), "model.draft", small)


def _choose_decode(small: SmallModel, methods: ComputeMethods) -> tuple[ComputeMethods, float]:
    """How the draft model decodes, beside a target that decodes by these methods, and the seconds of a step:
    compiled on a GPU, also where the target cannot be. ConfigError if it cannot."""
    own = replace(methods, fixed_width=0, quantization=None)
    if uses_gpu():
        own = replace(own, decode="compiled")
    problem: Exception | None = None
    for chosen in (own, replace(own, decode="paged")):
        try:
            return chosen, time_step(small.caller, chosen)
        except Exception as error:  # a library may raise anything for what it was not made for
            problem = problem or error
    raise small.make_error(f"cannot draft: {problem}") from problem


def load_mtp_source(
    config: Config, model_info: LoadedModelInfo, target: ModelCaller, vocab: int, methods: ComputeMethods
) -> LoadedSource | str:
    """The head in the checkpoint of `target`, or in `model.draft`; or why there is none. `target`: has logits
    of width `vocab` and decodes by `methods`, in pages. ModelLoadError if weights are missing."""
    split = None
    if config.model.draft is not None and config.prefill.sparse == "off":
        if not names_split_head(config.model):
            return f"model.draft {config.model.draft} is no head that was split off a checkpoint"
        split = find_draft_folder(config.model)
    found = find_mtp_head(model_info, split)
    if isinstance(found, str):
        return found
    hook = find_hidden_hook(target)
    trunk = None if hook is None else hook.trunk
    embed = getattr(trunk, "embed_tokens", None) or getattr(trunk, "embeddings", None)
    if hook is None or embed is None:
        return "the model's hidden states and embeddings were not found"
    ids, cache = mx.array([[1]]), target.make_cache()
    _, states = hook.record(lambda caller: caller.prefill(ids, cache, 0, TEXT_ONLY))
    hidden = states[0]  # [1, D]
    head = load_mtp_head(model_info, found, hidden.dtype)
    if head.width != hidden.shape[-1]:
        return f"the head is for hidden states of {head.width} numbers, and the model has {hidden.shape[-1]}"
    settle_weights(head, config, hidden.dtype)
    source = MTPSource(
        target,
        hook,
        head,
        embed,
        vocab,
        max_tokens=config.speculation.max_tokens,
        launch_first=methods.launch_first,
        compiled=is_compiled(methods.decode),
    )
    source.cost = max(time_draft(source.rows, hidden) / time_step(target, methods), MIN_COST)
    log.info("the checkpoint's own head drafts; a token of it costs %.2f of a step", source.cost)
    size = measure_footprint([source.rows.cache])
    footprint = replace(size, per_token=0, windows=((PLACES, size.per_token),))
    note = "the head that drafts (speculation.method)"
    return LoadedSource(source, count_weight_bytes(head), footprint, note)


def names_split_head(settings: ModelSettings) -> bool:
    """Whether `model.draft` is a head that mlx-vlm has split off a checkpoint, and not a model."""
    if settings.draft is None:
        return False
    config = read_json(find_draft_folder(settings) / "config.json")
    return str(config.get("model_type")).endswith("_mtp")


def measure_row_cost(caller: ModelCaller, methods: ComputeMethods, drafted: int) -> float:
    """The cost that one of `drafted` tokens adds to a step, in steps of one row. It is nothing if a forward
    has a fixed width, and little if it mostly reads weights."""
    warm_device()
    alone = time_step(caller, methods)
    return max(time_step(caller, methods, 1 + drafted) / alone - 1, 0.0) / drafted


def time_step(caller: ModelCaller, methods: ComputeMethods, count: int = 1) -> float:
    """Seconds of a compiled decode step of one row with `count` tokens."""
    cache = caller.make_cache()
    caller.prefill(mx.array([[1, 1]]), cache, 0, TEXT_ONLY)
    mx.eval(list_all_arrays(cache))
    batch = make_decode_batch(caller.make_cache(), methods, compiled_at_once=True)
    assert isinstance(batch, PagedDecodeBatch)
    batch.update(set(), [JoiningRow("trial", 2, cache)])
    decode = caller.make_decode([BASE] * count * (TIMED_STEPS + 2))
    seconds = []
    for _ in range(TIMED_STEPS + 2):
        started = time.perf_counter()
        first = batch.lengths[0]
        with caller.use_attention():
            logits = batch.forward(decode, mx.array([1] * count), range(first, first + count), [count])
        mx.eval(logits, *batch.list_state_arrays())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])  # the first ones compile


def time_draft(rows: MTPRows, hidden: mx.array) -> float:
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
