"""Embeds prompts with images and videos without encoding the same one twice.

An image or a video is a unit. The features of a unit's tokens are cached by a digest of the processed pixels.
Prompts are assembled from them and from the embeddings of the text. Features are cached only if the assembled
prompt equals the model's own bit for bit. Units are encoded one by one, and those of another set reused, if
the vision tower encodes each independently, as the load check finds. Else one call encodes all of a prompt.

A call of the tower is computed in parts, the blocks of the tower (hooks/tower_blocks.py): other requests have
their steps meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from cachetools import LRUCache

from mlxrun.core.errors import RequestError
from mlxrun.core.media_names import MediaKind
from mlxrun.model.hooks.tower_blocks import BlockRecorder, find_recorder
from mlxrun.model.run.prompt_inputs import ImagePrompt, PendingImages, PromptInputs, split_prompt
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.image_units import Media, MediaRegion, find_regions

log = logging.getLogger(__name__)

_MISFITS = (ValueError, TypeError, IndexError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Embeddings [n, D] of image tokens, and their deepstack features, in their own memory."""

    embeddings: mx.array
    deepstack: tuple[mx.array, ...]

    @staticmethod
    def from_prompt(inputs: PromptInputs, places: np.ndarray) -> ImageFeatures:
        """The features at the indices of all image tokens of a prompt."""
        assert inputs.embeds is not None
        rows = mx.arange(len(places))
        return ImageFeatures(inputs.embeds[0, mx.array(places)], tuple(d[rows] for d in inputs.deepstack))

    @staticmethod
    def concatenate(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        if len(parts) == 1:
            return parts[0]
        arrays = zip(*(part.list_arrays() for part in parts), strict=True)
        embeddings, *deepstack = (mx.concatenate(array) for array in arrays)
        return ImageFeatures(embeddings, tuple(deepstack))

    def make_blank(self, count: int) -> ImageFeatures:
        """Zeros in place of the features of `count` image tokens."""
        embeddings, *deepstack = (mx.zeros((count, *a.shape[1:]), a.dtype) for a in self.list_arrays())
        return ImageFeatures(embeddings, tuple(deepstack))

    @property
    def count(self) -> int:
        return int(self.embeddings.shape[0])

    def list_arrays(self) -> list[mx.array]:
        return [self.embeddings, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.list_arrays())


class FeatureCache(LRUCache[tuple[bytes, ...], ImageFeatures]):
    """Features within a budget of bytes. Keys are the digests of one or more images in order."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget, getsizeof=lambda features: features.nbytes)

    def add(self, digests: Sequence[bytes], features: ImageFeatures) -> None:
        """Cache evaluated features, unless they exceed the budget by themselves."""
        self.pop(tuple(digests), None)
        if features.nbytes <= self.maxsize:
            self[tuple(digests)] = features

    def match_prefix(self, digests: Sequence[bytes]) -> tuple[int, list[ImageFeatures]]:
        """How many of the first images are cached, and their features."""
        count, found = 0, []
        while count < len(digests):
            stops = (s for s in range(len(digests), count, -1) if tuple(digests[count:s]) in self)
            stop = next(stops, None)
            if stop is None:
                break
            found.append(self[tuple(digests[count:stop])])
            count = stop
        return count, found


class ImagePromptEmbedder:
    """Embeds prompts of one model. `budget`: bytes of cached features; 0: none. `separate`: the kinds of
    which the tower encodes each independently of the others."""

    def __init__(self, embedder: Embedder, budget: int, separate: Collection[MediaKind] = ()) -> None:
        self._embedder = embedder
        self._recorder = find_recorder(embedder.model) or BlockRecorder(embedder.model)
        self.features = FeatureCache(budget)
        self._enabled = budget > 0
        self._separate = frozenset(separate)
        # Whether assembled prompts equal those of the model; where units are separate, they were compared.
        self._verified = bool(separate)

    def embed(self, tokens: Sequence[int], media: Media, cached: int = 0) -> PromptInputs:
        """The inputs of a prompt, with all images pending that were not encoded before. `cached`: tokens in
        the row's cache, which need no embeddings."""
        regions = find_regions(tokens, self._embedder.tokens, media)
        if self.needs_no_image(regions, cached):
            return self.embed_text(tokens, media)
        kinds = {region.kind for region in regions}
        can_split = self._enabled and ("audio" not in kinds or len(kinds) == 1)
        prompt = split_prompt(tokens, media, regions) if can_split else None
        pending = PendingImages(tokens, media, prompt)
        if prompt is None:
            return PromptInputs(pending=pending)
        runs = prompt.split_places()
        if runs is not None and len(runs) > 1 and self._are_separate(prompt):
            first = next(image for image, run in enumerate(runs) if run[-1] >= cached)
            pending = replace(pending, runs=runs, first=first)
        try:
            return self._embed_known(pending) or PromptInputs(pending=pending)
        except _MISFITS as error:
            return self._embed_misfit(pending, error)

    def encode_part(self, inputs: PromptInputs, whole: bool = False) -> PromptInputs:
        """Compute the next part of the pending images: a block of the tower, or what is left of its call.
        `whole`: all of the call. RequestError if the model does not take these images."""
        pending = inputs.pending
        assert pending is not None
        try:
            if pending.made is None:
                known = self._embed_known(pending) if inputs.embeds is None else None
                if known is not None:  # another request had them encoded meanwhile
                    return known
                pending = self._begin_call(pending)
            if pending.blocks and not whole:
                mx.eval(pending.blocks[0])
                return replace(inputs, pending=replace(pending, blocks=pending.blocks[1:]))
            return self._end_call(inputs, pending)
        except _MISFITS as error:
            if not pending.runs:
                raise RequestError(f"images are refused for this model: {error}") from error
            return self._embed_misfit(pending, error)

    def _embed_misfit(self, pending: PendingImages, error: Exception) -> PromptInputs:
        log.warning("the images of a prompt cannot be encoded one by one: %s", error)
        return PromptInputs(pending=replace(pending, runs=(), first=0, blocks=(), made=None))

    def needs_no_image(self, regions: Sequence[MediaRegion], cached: int) -> bool:
        """Whether all images of a prompt lie in its cached tokens, so that none must be encoded."""
        is_computed = bool(regions) and cached >= regions[-1].spans[-1][1]
        return self._enabled and self._verified and is_computed

    def embed_text(self, tokens: Sequence[int], media: Media) -> PromptInputs:
        """What tokens after all images need."""
        return PromptInputs(position_delta=self._embedder.embed_text(tokens, media).position_delta)

    def _are_separate(self, prompt: ImagePrompt) -> bool:
        """Whether the kinds of media that the prompt has are encoded one by one."""
        kinds = {region.kind for region in prompt.regions}
        return bool(kinds) and kinds <= self._separate

    def _embed_known(self, pending: PendingImages) -> PromptInputs | None:
        """The prompt's inputs from images that were encoded before, with the others pending; None if none
        was, or if all must be encoded together."""
        prompt, runs = pending.prompt, pending.runs
        if prompt is None:
            return None
        count, known = self.features.match_prefix(prompt.digests)
        if not known or not runs and (len(known) > 1 or count < len(prompt.digests)):
            return None
        first = max(count, pending.first)
        known += [known[0].make_blank(len(run)) for run in runs[count:first]]
        inputs = self._assemble(prompt, ImageFeatures.concatenate(known))
        return replace(inputs, pending=replace(pending, first=first) if first < len(prompt.digests) else None)

    def _begin_call(self, pending: PendingImages) -> PendingImages:
        """Build the graph of a call that encodes the first pending unit, or all of them. Nothing is computed
        for a unit that was encoded before."""
        tokens, media, prompt = pending.tokens, pending.media, pending.prompt
        if pending.runs and prompt is not None:
            if self.find_features(pending) is not None:
                return pending
            part = prompt.cut(pending.runs, pending.first, pending.first + 1)
            tokens, media = part.tokens, part.media
        with self._recorder.record() as blocks:
            made = self._embedder.embed_prompt(tokens, media)
        return replace(pending, blocks=tuple(blocks[:-1]), made=made)  # the last one comes with the rest

    def find_features(self, pending: PendingImages) -> ImageFeatures | None:
        """The features of the first pending unit, if it was encoded before."""
        assert pending.prompt is not None
        return self.features.get((pending.prompt.digests[pending.first],))

    def _end_call(self, inputs: PromptInputs, pending: PendingImages) -> PromptInputs:
        """The inputs with what the call returned, of which all blocks are computed."""
        prompt, runs, first = pending.prompt, pending.runs, pending.first
        if not runs or prompt is None:
            assert pending.made is not None
            return self._keep_all(prompt, _evaluate(pending.made))
        features = self.find_features(pending)
        if features is None:
            assert pending.made is not None
            part = prompt.cut(runs, first, first + 1)
            features = ImageFeatures.from_prompt(pending.made, part.places)
            mx.eval(features.list_arrays())
            self.features.add(part.digests, features)
        if features.count != len(runs[first]):
            raise ValueError(f"{features.count} features of an image for {len(runs[first])} image tokens")
        if inputs.embeds is None:
            blank = [features.make_blank(len(run)) for run in runs[:first]]
            inputs = self._assemble(prompt, ImageFeatures.concatenate([*blank, features]))
        else:
            inputs = insert_features(inputs, runs[first], features)
        rest = replace(pending, first=first + 1, made=None) if first + 1 < len(runs) else None
        return _evaluate(replace(inputs, pending=rest))

    def _keep_all(self, prompt: ImagePrompt | None, inputs: PromptInputs) -> PromptInputs:
        """The inputs of a prompt that the model embedded; its features are cached if they can be reused."""
        if prompt is None or not self._enabled or len(prompt.places) == 0 or inputs.embeds is None:
            return inputs
        try:
            features = ImageFeatures.from_prompt(inputs, prompt.places)
            self._enabled = _are_equal(self._assemble(prompt, features), inputs)
        except _MISFITS as error:
            log.debug("a prompt cannot be assembled from image features: %s", error)
            self._enabled = False
        if not self._enabled:
            log.info("image features of this model are not cached: prompts assembled from them differ")
            return inputs
        self._verified = True
        mx.eval(features.list_arrays())
        self.features.add(prompt.digests, features)
        return inputs

    def _assemble(self, prompt: ImagePrompt, features: ImageFeatures) -> PromptInputs:
        """The prompt's inputs from the embeddings of its text and the features of its first images."""
        text = self._embedder.embed_text(prompt.tokens, prompt.media)
        assert text.embeds is not None
        if features.count > len(prompt.places):
            raise ValueError(f"{features.count} image features for {len(prompt.places)} image tokens")
        embeds = text.embeds.astype(features.embeddings.dtype)[...]
        embeds[0, mx.array(prompt.places[: features.count])] = features.embeddings
        visual = np.zeros(len(prompt.tokens), dtype=np.bool_)
        visual[prompt.places] = True
        mask = visual if features.deepstack else None
        return _evaluate(replace(text, embeds=embeds, visual_mask=mask, deepstack=features.deepstack))


def insert_features(inputs: PromptInputs, run: np.ndarray, features: ImageFeatures) -> PromptInputs:
    """The inputs with the features of one more image, whose tokens are at the indices `run`."""
    assert inputs.embeds is not None
    embeds = inputs.embeds[...]
    embeds[0, mx.array(run)] = features.embeddings
    both = zip(inputs.deepstack, features.deepstack, strict=True)
    return replace(inputs, embeds=embeds, deepstack=tuple(map(mx.concatenate, both)))


def _evaluate(inputs: PromptInputs) -> PromptInputs:
    mx.eval(inputs.list_arrays())
    return inputs


def _are_equal(one: PromptInputs, other: PromptInputs) -> bool:
    """Bit by bit; the visual mask matters only where there are deepstack features."""
    arrays, others = one.list_arrays(), other.list_arrays()
    masks = [None if i.visual_mask is None else i.visual_mask.tolist() for i in (one, other)]
    return (
        one.position_delta == other.position_delta
        and (not other.deepstack or masks[0] == masks[1])
        and len(arrays) == len(others)
        and all(
            a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b, equal_nan=True).item()
            for a, b in zip(arrays, others, strict=True)
        )
    )
