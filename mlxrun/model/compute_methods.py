"""How a model is computed: the fast way that passed the probe, or the safe one.

decode: `ragged` (one forward, attention by groups), `grouped` (one forward a group of similar rows) or
`alone` (one forward a row). Each is as exact as the next one, only faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxrun.model.chunk_grouping import PrefillSharing
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.decode_batch import DecodeBatch
from mlxrun.model.ragged.layer_caches import LayerKind
from mlxrun.model.ragged.row_by_row import RowByRowBatch

AnyDecodeBatch = DecodeBatch | RowByRowBatch
DecodeMethod = Literal["ragged", "grouped", "alone"]


@dataclass(frozen=True, slots=True)
class ComputeMethods:
    """`fixed_width`: rows of every decode forward, filled up with dummies; 0: as many as there are. With a
    fixed width each row also attends alone, so that its result does not depend on the others.
    `launch_first`: launch a step before the tokens of the last one are read (see docs/architecture.md).
    """

    decode: DecodeMethod = "ragged"
    sharing: PrefillSharing = field(default_factory=PrefillSharing)
    fixed_width: int = 0
    launch_first: bool = False


def make_decode_batch(
    template: Sequence[Any], methods: ComputeMethods, shortest: int | None = None
) -> AnyDecodeBatch:
    """An empty decode batch that works by these methods. `shortest`: see DecodeBatch."""
    if methods.decode == "alone" or not can_batch(template):
        return RowByRowBatch()
    fixed = methods.fixed_width
    if fixed and methods.decode == "grouped":
        return RowByRowBatch()
    return DecodeBatch(
        template,
        one_pass=methods.decode == "ragged",
        split_rows=bool(fixed),
        width=fixed,
        shortest=shortest,
    )


def can_batch(template: Sequence[Any]) -> bool:
    """Whether every cache of the model is of a class that the decode batch knows."""
    return all(
        layer_caches.get_kind(leaf) is not LayerKind.OTHER for leaf in layer_caches.flatten_caches(template)
    )


def find_padding_limit(template: Sequence[Any], chunk: int) -> int:
    """The longest first chunk that may be padded on the right: see model/prefill.py. 0: none."""
    kinds = {layer_caches.get_kind(leaf) for leaf in layer_caches.flatten_caches(template)}
    if not kinds <= {LayerKind.KV, LayerKind.WINDOW}:
        return 0
    windows = [
        w
        for leaf in layer_caches.flatten_caches(template)
        if (w := layer_caches.get_window(leaf)) is not None
    ]
    return min([chunk, *windows])
