"""How a model is called: the only fork between text and vision. All code above this is one path.

ModelCaller calls a text model of mlx-lm, VisionModelCaller the language part of an mlx-vlm model. What an
image needs (embeddings, positions, visual masks, deepstack features) belongs to the request. It is computed
once, sliced by chunk and passed explicitly each time. Nothing is read from or left on the shared module.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.core.media_names import (
    MEDIA_PAIRS,
    PLURALS,
    MediaKind,
    describe_refusal,
    list_refusable,
    name_pair,
)
from mlxrun.model.fused.operations import choose_operations
from mlxrun.model.hooks.adapted_layers import BASE, RowAdapters
from mlxrun.model.hooks.engine_attention import AttentionCall, use_engine_attention
from mlxrun.model.hooks.install import InstalledHook
from mlxrun.model.hooks.weight_form import PLAIN_WEIGHTS, WeightForm
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.run.compute_methods import AttentionMethod
from mlxrun.model.run.prompt_inputs import TEXT_ONLY, PromptInputs
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.features import ImagePromptEmbedder
from mlxrun.model.vision.image_units import TOKEN_TYPES, find_tower_array, group_by_kind

MAX_CHANGE = 0.25  # of a token's logits by the token behind it, in standard deviations, which is rounding
NOT_COMPARED = "they were not compared with what the library computes"


def run_trial_forward(caller: ModelCaller, *, known: bool = False) -> tuple[list[Any], int]:
    """Caches with two tokens, for their shapes, and the width of the logits. `known`: that the model passes;
    then nothing is computed.

    ModelLoadError if the model computes NaN, or if its tokens see later ones, as in diffusion models. Where
    the library computes prompts at once for this reason (PaliGemma), the caller has `whole_prompts` then.
    """
    cache = caller.make_cache()
    try:
        logits = caller.prefill(mx.array([[1, 1]]), cache, 0, TEXT_ONLY)
        if known:
            return cache, int(logits.shape[-1])
        mx.eval(logits, list_all_arrays(cache))
    except (RuntimeError, ValueError, TypeError) as error:  # MLX's own, as without a kernel for a dtype
        advice = "see whether another model.dtype works"
        if "filesystem error" in str(error):
            advice = (
                f"MLX compiles code in {os.environ.get('TMPDIR', '/tmp')}: set TMPDIR to a writable folder"
            )
        raise ModelLoadError(f"the library cannot compute this model here ({error}); {advice}") from error
    if mx.any(mx.isnan(logits)).item():
        raise ModelLoadError("the model computes NaN: its weights are damaged, or need another model.dtype")
    other = caller.prefill(mx.array([[1, 2]]), caller.make_cache(), 0, TEXT_ONLY)
    change = mx.abs(logits[:, 0] - other[:, 0]).max() / mx.std(logits[:, 0])
    caller.whole_prompts = change.item() > MAX_CHANGE
    if caller.whole_prompts and not caller.library_computes_whole:
        raise ModelLoadError("the tokens of a prompt see later ones (bidirectional attention): not supported")
    return cache, int(logits.shape[-1])


class ModelCaller:
    """Calls a loaded model for the runner; this class is for text models.

    `weights`: their form. `row_adapters`: the LoRA adapters of a forward's rows, None: there are none.
    `attention`: whose attention its forwards over plain arrays use, as the load check decides.
    `fused_prompts`: fused layers compute prompts too. `hooks`: the changes to the library's model.
    """

    attention: AttentionMethod = "engine"
    fused_prompts = False
    whole_prompts = False  # the tokens of a prompt see later ones
    library_computes_whole = False  # the library's policy is to compute prompts at once
    hooks: tuple[InstalledHook, ...] = ()

    def __init__(
        self,
        model: nn.Module,
        weights: WeightForm = PLAIN_WEIGHTS,
        row_adapters: RowAdapters | None = None,
    ) -> None:
        self.model = model
        self.weights = weights
        self.row_adapters = row_adapters or RowAdapters()

    @property
    def text_model(self) -> nn.Module:
        """The model that makes logits of tokens."""
        return self.model

    @property
    def media_tokens(self) -> frozenset[int]:
        """The placeholders of images, videos and audio in prompts."""
        return frozenset()

    def make_cache(self) -> list[Any]:
        """Empty single-row caches, one a layer."""
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.model)

    def call_library(self, ids: Sequence[int], cache: list[Any], start: int) -> mx.array:
        """Logits [1, n, V], lazy, of tokens after the `start` ones in `cache`, as the library calls its
        model, with its own positions."""
        logits: mx.array = self.model(mx.array([list(ids)]), cache=cache)
        return logits

    def use_attention(
        self, calls_per_launch: int = 0, check: AttentionCall | None = None
    ) -> AbstractContextManager[None]:
        """Within the block, the engine's forwards use `attention`. The arguments are those of
        `use_engine_attention`."""
        if self.attention != "engine":
            return nullcontext()
        operations = choose_operations() if self.fused_prompts else None
        return use_engine_attention(calls_per_launch, check, operations=operations)

    def prepare_inputs(self, prompt: Sequence[int], media: Any, cached: int = 0) -> PromptInputs:
        """The request's inputs besides token ids. RequestError if the model cannot use `media`. `cached`:
        tokens in the row's cache, for which `prefill` will not be called."""
        if media is not None:
            raise RequestError("this model takes no images")
        return TEXT_ONLY

    def encode_part(self, inputs: PromptInputs, whole: bool = False) -> PromptInputs:
        """The same inputs after one more part of their pending images: a block of the vision tower, or its
        `whole` call."""
        return inputs

    def encode_images(self, inputs: PromptInputs, stop: int) -> PromptInputs:
        """The same inputs with the features of all images in tokens [0, stop)."""
        while inputs.ready is not None and inputs.ready < stop:
            inputs = self.encode_part(inputs, whole=True)
        return inputs

    def prefill(self, ids: mx.array, cache: list[Any], start: int, inputs: PromptInputs) -> mx.array:
        """Logits [B, n, V], lazy, of tokens `ids` [B, n] at positions start..start+n. Fills `cache`."""
        logits: mx.array = self.text_model(ids, cache=cache)
        return logits

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int] | mx.array) -> mx.array:
        """Logits [B, 1, V] of one new token a row, `ids` [B, 1], at these rotary positions."""
        logits: mx.array = self.model(ids, cache=cache)
        return logits

    def make_decode(self, numbers: Iterable[int]) -> Callable[..., mx.array]:
        """`decode` for rows with the LoRA adapters of these numbers: one for each row of all calls together,
        in order, with the dummies between them. More rows are dummies without an adapter. Without adapters
        the function is always the same, so that a compiled forward can be reused."""
        if not self.row_adapters.names:
            return self.decode
        left = iter(numbers)

        def decode(ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
            own = list(itertools.islice(left, ids.shape[0]))
            with self.row_adapters.use(own + [BASE] * (ids.shape[0] - len(own))):
                return self.decode(ids, cache, positions)

        return decode


class VisionModelCaller(ModelCaller):
    """Calls a model of mlx-vlm. Text-only requests take the same path, without embeddings.

    `image_bytes`: budget for features of images that were seen before (model/vision/features.py); 0: none.
    `exact_sets_only`: one call encodes all images of a prompt, and features are reused only if all are the
    same, which is exact bit for bit.
    `line_break`: the token between the lines of an image, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        image_bytes: int = 0,
        exact_sets_only: bool = False,
        line_break: int | None = None,
        weights: WeightForm = PLAIN_WEIGHTS,
        row_adapters: RowAdapters | None = None,
    ) -> None:
        super().__init__(model, weights, row_adapters)
        self._language = model.language_model
        chunked = getattr(model, "chunked_prefill_policy", None)
        self.library_computes_whole = chunked is not None and not chunked()
        self.embedder = Embedder(model, line_break)
        self._mrope = self.embedder.mrope
        self._image_bytes = image_bytes
        self._exact_sets_only = exact_sets_only
        # Why the model takes none of these; empty if it does. The load check compares prompts with both.
        self.refused = dict.fromkeys(PLURALS.values(), "")
        self.refused |= {name_pair(*pair): NOT_COMPARED if pair[0] != pair[1] else "" for pair in MEDIA_PAIRS}
        self.reset_images()

    def follow(self, refused: Mapping[str, str], cached: bool, separate: Collection[MediaKind]) -> None:
        """Refuse, cache and encode media as the load check decided for this model with another caller."""
        self.refused |= refused
        self.reset_images(cached, separate)

    def reset_images(self, cached: bool = True, separate: Collection[MediaKind] = ()) -> None:
        """Forget all images. From now on those of a prompt are encoded one by one if they are of `separate`
        kinds, and the features of each are reused. Else, and without `cached`, one call encodes them."""
        known = () if self._exact_sets_only else separate
        self._images = ImagePromptEmbedder(self.embedder, self._image_bytes if cached else 0, known)

    @property
    def text_model(self) -> nn.Module:
        return self._language

    @property
    def media_tokens(self) -> frozenset[int]:
        return frozenset(self.embedder.tokens.by_kind.values())

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import make_prompt_cache

        return make_prompt_cache(self._language)

    def call_library(self, ids: Sequence[int], cache: list[Any], start: int) -> mx.array:
        tokens, made = mx.array([list(ids)]), {}
        if not start:  # as the library begins a prompt: some models need what they make of it
            self.embedder.forget_positions()
            features = self.model.get_input_embeddings(tokens, None, mask=mx.ones_like(tokens)).to_dict()
            made = {name: value for name, value in features.items() if value is not None}
        logits: mx.array = self._language(tokens, cache=cache, **made).logits
        return logits

    def prepare_inputs(self, prompt: Sequence[int], media: Any, cached: int = 0) -> PromptInputs:
        kinds = [] if media is None else list(group_by_kind(media))
        kinds += ["audio"] * (len(find_tower_array("audio", media)) - 1 if "audio" in kinds else 0)
        for name in list_refusable(kinds):
            if why := self.refused[name]:
                raise RequestError(describe_refusal(name, why))
        if media is None:
            return TEXT_ONLY
        inputs = self._images.embed(prompt, media, cached)
        types = {name: np.asarray(media[name]) for name in TOKEN_TYPES if name in media}
        return replace(inputs, token_types=types) if types else inputs

    def encode_part(self, inputs: PromptInputs, whole: bool = False) -> PromptInputs:
        return replace(self._images.encode_part(inputs, whole), token_types=inputs.token_types)

    def prefill(self, ids: mx.array, cache: list[Any], start: int, inputs: PromptInputs) -> mx.array:
        stop = start + ids.shape[1]
        assert inputs.ready is None or stop <= inputs.ready, "images of these tokens are not encoded"
        prompt = 0 if inputs.embeds is None else inputs.embeds.shape[1]
        if start < prompt < stop:  # a preempted row: its answer so far has token ids only
            first = self.prefill(ids[:, : prompt - start], cache, start, inputs)
            rest = self.prefill(ids[:, prompt - start :], cache, prompt, inputs)
            return mx.concatenate([first, rest], axis=1)
        extra = self.slice_inputs(inputs, start, stop) if start < prompt else {}
        if self._mrope and "position_ids" not in extra:
            positions = mx.arange(start + inputs.position_delta, stop + inputs.position_delta)
            extra["position_ids"] = self._arrange_axes(mx.broadcast_to(positions, (3, *ids.shape)))
        self.embedder.forget_positions()
        logits: mx.array = self.text_model(ids, cache=cache, **extra).logits
        return logits

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int] | mx.array) -> mx.array:
        extra: dict[str, Any] = {}
        self.embedder.forget_positions()
        if self._mrope:  # always explicit: without it the model would use the state of the last prefill
            rows = positions if isinstance(positions, mx.array) else mx.array(positions, dtype=mx.int32)
            extra["position_ids"] = self._arrange_axes(mx.broadcast_to(rows[None, :, None], (3, *ids.shape)))
        logits: mx.array = self._language(ids, cache=cache, **extra).logits
        return logits

    def slice_inputs(self, inputs: PromptInputs, start: int, stop: int) -> dict[str, Any]:
        """A chunk of what replaces or accompanies the token ids of a prompt with images."""
        extra: dict[str, Any] = {}
        if inputs.embeds is not None:
            extra["inputs_embeds"] = inputs.embeds[:, start:stop]
        if inputs.per_layer is not None:
            extra["per_layer_inputs"] = inputs.per_layer[:, start:stop]
        if inputs.deepstack and inputs.visual_mask is not None:
            extra |= self._slice_deepstack(inputs, inputs.visual_mask, start, stop)
        if inputs.positions is not None:
            extra["position_ids"] = self._arrange_axes(inputs.positions[..., start:stop])
        types = {name: array[:, start:stop] for name, array in inputs.token_types.items()}
        return extra | {name: mx.array(part) for name, part in types.items() if part.any()}

    def _arrange_axes(self, positions: mx.array) -> mx.array:
        """Positions [3, B, L] as the model takes them."""
        return mx.moveaxis(positions, 0, -1) if self.embedder.axes_last else positions

    def _slice_deepstack(
        self, inputs: PromptInputs, visual: np.ndarray[Any, np.dtype[np.bool_]], start: int, stop: int
    ) -> dict[str, Any]:
        """Mask and features of the visual tokens in the chunk; nothing if it has none."""
        first, last = int(visual[:start].sum()), int(visual[:stop].sum())
        if first == last:
            return {}
        whole = self.embedder.deepstack_form == "prompt"
        parts = inputs.deepstack if whole else [d[first:last] for d in inputs.deepstack]
        return self.embedder.shape_deepstack(parts, visual, start, stop)
