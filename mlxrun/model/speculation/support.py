"""Whether drafts can be verified for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.model.compute_methods import ComputeMethods


def find_draft_problem(template: Sequence[Any], methods: ComputeMethods) -> str | None:
    """Why this model does not draft; None if it can. `template`: its caches."""
    if methods.decode not in ("compiled", "paged"):
        return f"drafts need decoding by pages, which is for GPUs; this model decodes {methods.decode}"
    return methods.draft_problem or None
