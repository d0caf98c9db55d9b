"""Loads the weights of encoders, which this package implements itself. On the engine thread only."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.tensor_files import read_tensors
from mlxrun.model.load.weight_check import is_float
from mlxrun.model.pooling.encoders import make_encoder, rename_weight
from mlxrun.model.pooling.score_head import is_head_weight

log = logging.getLogger(__name__)
# Tensors that checkpoints have beside the encoder, and that no vector depends on.
_UNUSED = re.compile(r"(^|\.)(position_ids|token_type_ids)$|^(cls|lm_head|decoder|predictions)\.")


def load_encoder(
    folder: Path, config: Mapping[str, Any], dtype: mx.Dtype
) -> tuple[nn.Module, dict[str, mx.array]]:
    """The encoder, and the tensors of a head in float32. ModelLoadError if weights are missing."""
    tensors: dict[str, mx.array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= read_tensors(file)
    whole = sorted(name for name in tensors if not (is_float(tensors[name]) or _UNUSED.search(name)))
    if whole and not config.get("quantization"):
        raise ModelLoadError(f"{folder}: {whole[0]} is of type {tensors[whole[0]].dtype}, not a floating one")
    if config.get("quantization"):
        raise ModelLoadError(f"{folder}: quantized encoders are not supported; use the original weights")
    head = {name: value.astype(mx.float32) for name, value in tensors.items() if is_head_weight(name)}
    weights = {
        rename_weight(name): value.astype(dtype)
        for name, value in tensors.items()
        if name not in head and not _UNUSED.search(name)
    }
    try:
        model = make_encoder(config)
    except KeyError as error:
        raise ModelLoadError(f"{folder}/config.json: {error.args[0]} is missing") from error
    wanted = {name: value.shape for name, value in tree_flatten(model.parameters())}
    given = {name: value.shape for name, value in weights.items()}
    wrong = [
        *(f"{name} is missing" for name in sorted(wanted.keys() - given.keys())),
        *(
            f"{name} has shape {given[name]}, not {shape}"
            for name, shape in sorted(wanted.items())
            if given.get(name, shape) != shape
        ),
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ModelLoadError(f"{folder}: the weights do not fit the config: {'; '.join(wrong[:3])}{more}")
    unknown = sorted(given.keys() - wanted.keys())
    if unknown:
        log.warning("%s: %d tensors are not used, such as %s", folder, len(unknown), unknown[0])
    model.load_weights([(name, weights[name]) for name in wanted])
    model.eval()
    mx.eval(model.parameters(), head)
    return model, head
