"""How a model is computed: the fastest methods that passed the load check.

The decode methods, from the fastest to the slowest, are all exact:

    fused       as `compiled`, with few kernels in layers of the usual layout
    compiled    as `paged`, with a compiled forward
    paged       one forward, attention by one kernel for all rows, on GPUs
    ragged      one forward, attention by row groups
    grouped     one forward a row group
    row_by_row  one forward a row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from mlxrun.model.fused.operations import choose_operations
from mlxrun.model.hooks.draft_layout import DraftRecurrence
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.paged.paged_cache import Attend
from mlxrun.model.kv.ragged.decode_batch import DecodeBatch, RowByRowBatch
from mlxrun.model.kv.ragged.layer_caches import KEYED, LayerKind, flatten_caches, get_kind, get_window
from mlxrun.model.kv.ragged.quantized_buffer import KVQuantization
from mlxrun.model.run.chunk_grouping import PrefillSharing

AttentionMethod = Literal["engine", "library"]
AnyDecodeBatch = PagedDecodeBatch | DecodeBatch | RowByRowBatch
LIBRARY_CHUNK = 2048  # tokens: the prefill step of mlx-lm and of mlx-vlm
DecodeMethod = Literal["fused", "compiled", "paged", "ragged", "grouped", "row_by_row"]


@dataclass(frozen=True, slots=True)
class ComputeMethods:
    """How prompts and rows of a model are computed.

    `fixed_width`: rows of every decode forward, padded with dummy rows; 0: as many as there are. With a fixed
    width each row also attends as it does by itself, so that its result does not depend on the others.
    `any_width`: rows in pages round alike in forwards of any width, so that `fixed_width` need not be filled.
    `narrow_widths`: without pages, smaller widths with the same bits, for fewer rows. `grid`: with a fixed
    width, the chunks of all prompts end at multiples of this many tokens; 1: anywhere. `launch_first`:
    launch a step before the tokens of the last one are read (docs/architecture/decoding.md). `snapshots`:
    rows are copied for the prefix cache and restored from it. `fused_prompts`: fused layers compute prompts
    too.

    `library_chunks`: each prompt is split as the library splits it, since other chunks would change the
    result. `whole_prompts`: and at once, with its last token, since its tokens see later ones. `whole_media`:
    a prompt with images is computed at once up to the last of them. `quantization`: of the keys and values of
    decoding rows; only with `ragged`. `attention`: whose attention forwards over plain arrays use.

    `draft_problem`: why rows in pages may not take several tokens in a forward; empty: they may, or it was
    not compared. `recurrence`: how recurrent layers compute drafts (hooks/draft_layout.py); with
    `wide_passes`, each token in as many rows as a step has.
    """

    decode: DecodeMethod = "ragged"
    sharing: PrefillSharing = field(default_factory=PrefillSharing)
    _: KW_ONLY
    fixed_width: int = 0
    any_width: bool = False
    launch_first: bool = False
    snapshots: bool = True
    fused_prompts: bool = False
    library_chunks: bool = False
    whole_prompts: bool = False
    whole_media: bool = False
    quantization: KVQuantization | None = None
    grid: int = 1
    draft_problem: str = ""
    recurrence: DraftRecurrence = "wide_passes"
    attention: AttentionMethod = "engine"
    narrow_widths: tuple[int, ...] = ()

    @property
    def shares_pages(self) -> bool:
        """Whether rows that begin with the same tokens share their pages. One must be able to continue from
        another's."""
        return uses_pages(self.decode) and self.snapshots

    def split_as_library(self) -> ComputeMethods:
        """The same methods, with each prompt split as the library splits it. Nothing may start from a
        snapshot."""
        sharing = replace(self.sharing, merge_chunks=False, tails=False)
        return replace(self, sharing=sharing, snapshots=False, library_chunks=True)


def make_decode_batch(
    template: Sequence[Any],
    methods: ComputeMethods,
    shortest: int | None = None,
    attend: Attend | None = None,
    *,
    compiled_at_once: bool = False,
) -> AnyDecodeBatch:
    """An empty decode batch that works by these methods. `shortest`: see DecodeBatch. `attend`,
    `compiled_at_once`: see PagedDecodeBatch."""
    one_pass, width = methods.decode == "ragged", methods.fixed_width
    if uses_pages(methods.decode) and can_batch(template):
        return PagedDecodeBatch(
            template,
            width=width,
            any_width=methods.any_width,
            compiled=is_compiled(methods.decode),
            recurrence=methods.recurrence,
            attend=attend,
            compiled_at_once=compiled_at_once,
            operations=choose_operations() if methods.decode == "fused" else None,
        )
    if methods.decode == "row_by_row" or (width and not one_pass) or not can_batch(template):
        return RowByRowBatch()
    return DecodeBatch(
        template,
        one_pass=one_pass,
        widths=(*methods.narrow_widths, width) if width else (),
        shortest=shortest,
        quantization=methods.quantization,
    )


def uses_pages(method: DecodeMethod) -> bool:
    """Whether rows are in pages."""
    return is_compiled(method) or method == "paged"


def is_compiled(method: DecodeMethod) -> bool:
    """Whether forwards of rows are compiled."""
    return method in ("fused", "compiled")


def can_batch(template: Sequence[Any]) -> bool:
    """Whether the decode batch supports the class of every cache of the model."""
    return all(get_kind(layer) is not LayerKind.OTHER for layer in flatten_caches(template))


def can_stack(template: Sequence[Any]) -> bool:
    """Whether rows with equally many tokens can be stacked. A window cannot, since it may have turned."""
    return {get_kind(layer) for layer in flatten_caches(template)} <= {LayerKind.KV, LayerKind.STATE}


def find_padding_limit(template: Sequence[Any], chunk: int) -> int:
    """The number of tokens of the longest first chunk that may be padded (see chunk_grouping.py); 0: none."""
    layers = flatten_caches(template)
    if not {get_kind(layer) for layer in layers} <= KEYED:
        return 0
    return min([chunk, *(window for layer in layers if (window := get_window(layer)) is not None)])
