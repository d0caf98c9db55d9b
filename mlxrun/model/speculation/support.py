"""Whether drafts can be verified for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.model.ragged.layer_caches import LayerKind, flatten_caches, get_kind


def find_draft_problem(template: Sequence[Any], methods: ComputeMethods) -> str | None:
    """Why this model does not draft; None if it can. `template`: its caches."""
    if any(get_kind(layer) is LayerKind.STATE for layer in flatten_caches(template)):
        return "the model has recurrent states, which cannot go back to an earlier token"
    if methods.decode not in ("compiled", "paged"):
        return f"drafts need decoding by pages, which is for GPUs; this model decodes {methods.decode}"
    return None
