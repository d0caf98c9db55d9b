"""Whether drafts can be verified for a model, and whether that takes longer the more tokens they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.machine.device import uses_gpu
from mlxrun.model.run.compute_methods import ComputeMethods


def find_device_problem() -> str | None:
    """Why no model drafts on this device; None if some may."""
    return None if uses_gpu() else "drafts need decoding by pages, which is for GPUs, and this is a CPU"


def find_draft_problem(methods: ComputeMethods) -> str | None:
    """Why a model that is computed by these methods does not draft; None if it can."""
    if methods.decode not in ("compiled", "paged"):
        return f"drafts need decoding by pages, which is for GPUs; this model decodes {methods.decode}"
    return methods.draft_problem or None


def computes_token_by_token(template: Sequence[Any]) -> bool:
    """Whether some layers compute the drafted tokens of a row one after the other. `template`: the model's
    caches."""
    return LayerKind.STATE in map(get_kind, flatten_caches(template))
