"""Compares the weights of a checkpoint with the parameters of the model that takes them.

Missing ones, and ones of another shape, are refused by name: the library would leave random numbers. So are
whole numbers in place of fractions. Ones that the model has no parameter for are left out where they cannot
matter (a head that drafts, a further tower, a buffer that is computed anew), and refused where the model
might need them: a bias or a norm inside one of its layers means that the architecture is another one.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.core.errors import ModelLoadError

log = logging.getLogger(__name__)

SHOWN = 3  # names in a message
# Buffers that libraries compute anew, and scales of caches that are not quantised here.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb|rotary_pos_emb|rope)\.|(^|\.)(inv_freq|freqs_cis|masked_bias|position_ids|k_scale"
    r"|v_scale|num_batches_tracked|_extra_state)$"
)
# Parts beside the language model, and heads for other tasks; of these the model has no module at all.
_OTHER_PARTS = re.compile(
    r"mtp|nextn|eagle|medusa|draft|vision|visual|image|img|video|vit$|vpm|audio|speech|whisper|talker|token2wav"
    r"|tts|projector|connector|resampler|aligner|merger|score|classifier|value_head|v_head|reward"
)
# In the layer behind the last one of models that draft with it; without these, the config has too few layers.
_DRAFTING_LAYER = re.compile(r"(.*\.\d+)\.(eh_proj|enorm|hnorm|shared_head|nextn)\.")
_WRAPPERS = {"model", "language_model", "transformer", "backbone", "text_model", "llm", "thinker"}
_LOADING = threading.Lock()  # a class is changed for all threads


def load_checked_weights(
    model: nn.Module, weights: Mapping[str, mx.array], path: Path, tied: bool = False
) -> tuple[str, ...]:
    """Give the model its weights, and return the names of those that it has no use for, sorted; the log has
    them too. ModelLoadError if one is missing, has another shape, or might be needed. `tied`: the model's
    embedding is also its head, so that a head of its own is not used."""
    parameters = dict(tree_flatten(model.parameters()))
    unused = sorted(weights.keys() - parameters.keys())
    drafting = _list_drafting_layers(unused)
    harmful = [name for name in unused if not _is_harmless(model, name, tied, drafting)]
    if harmful:
        raise ModelLoadError(
            f"{path}: the checkpoint has weights that are not in model {type(model).__module__}, "
            f"so its answers might be wrong: {_list_names(harmful)}"
        )
    missing = sorted(parameters.keys() - weights.keys())
    if missing:
        raise ModelLoadError(f"{path}: missing weights: {_list_names(missing)}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ModelLoadError(
                f"{path}: {name} has the shape {weights[name].shape}, where the model has {parameter.shape}"
            )
        if is_float(parameter) != is_float(weights[name]):
            raise ModelLoadError(
                f"{path}: {name} is of type {weights[name].dtype}, where the model has {parameter.dtype}"
            )
    nn.Module.load_weights(model, [(name, weights[name]) for name in parameters])
    if unused:
        log.warning("%s: the model does not use %s", path, _list_names(unused))
    return tuple(unused)


def is_float(array: mx.array) -> bool:
    """Whether it has floating-point numbers; what is quantized, or counts, has whole ones."""
    return bool(mx.issubdtype(array.dtype, mx.floating))


@contextmanager
def check_loading(model_class: type[nn.Module], path: Path, tied: bool) -> Iterator[list[str]]:
    """While this runs, a model of the class takes its weights through `load_checked_weights`; the list gets
    the names of unused ones. The libraries build the model inside the function that loads it, and either
    refuse all that they do not know or check nothing. One thread loads at a time."""
    with _LOADING:
        yield from _replace_loading(model_class, path, tied)


def _replace_loading(model_class: type[nn.Module], path: Path, tied: bool) -> Iterator[list[str]]:
    unused: list[str] = []
    own = model_class.__dict__.get("load_weights")

    def load(model: nn.Module, weights: Sequence[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
        unused.extend(load_checked_weights(model, dict(weights), path, tied))
        return model

    changed: Any = model_class
    changed.load_weights = load
    try:
        yield unused
    finally:
        if own is None:
            del changed.load_weights
        else:
            changed.load_weights = own


def _list_drafting_layers(names: Iterable[str]) -> set[str]:
    return {found[1] for name in names if (found := _DRAFTING_LAYER.match(name))}


def _is_harmless(model: nn.Module, name: str, tied: bool, drafting: set[str]) -> bool:
    """Whether the model computes the same without this weight."""
    if _BUFFERS.search(name):
        return True
    place: Any = model
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                return ".".join(parts[: depth + 1]) in drafting
            place = place[int(part)]
        elif isinstance(place, nn.Module) and part in place:
            place = place[part]
        else:
            is_outside = set(parts[:depth]) <= _WRAPPERS
            is_head = tied and part == "lm_head"
            return is_outside and (is_head or _OTHER_PARTS.search(part) is not None)
    return False


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} ({', '.join(names[:SHOWN])}{more})" if len(names) > 1 else names[0]
