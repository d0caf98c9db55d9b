"""Embeds prompts with images and videos without encoding the same one twice.

An image or a video is a unit. The features of a unit's tokens are cached by a digest of the processed pixels.
Prompts are assembled from them and from the embeddings of the text. Features are cached only if the assembled
prompt equals the model's own bit for bit. Images of another set are reused if the vision tower encodes each
independently.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from cachetools import LRUCache

from mlxrun.core.media_names import KINDS, MediaKind
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
    """Embeds prompts of one model. `budget`: bytes of cached features; 0: none."""

    def __init__(self, embedder: Embedder, budget: int, exact_sets_only: bool = False) -> None:
        self._embedder = embedder
        self.features = FeatureCache(budget)
        self._enabled = budget > 0 and bool(embedder.tokens.by_kind)
        self._verified = False  # assembled prompts equal those of the model
        # Whether the tower of each kind encodes one medium independently of others; None: not known yet. That
        # of audio may depend on the lengths, so no pair tells it of others.
        self._independent: dict[MediaKind, bool | None] = dict.fromkeys(
            KINDS, False if exact_sets_only else None
        )
        self._independent["audio"] = False

    def embed(self, tokens: Sequence[int], media: Media, cached: int = 0) -> PromptInputs:
        """The inputs of a prompt. `cached`: tokens in the row's cache, which need no embeddings. If images
        are known to be independent, at most one is encoded here, and `encode_pending` encodes the others."""
        regions = find_regions(tokens, self._embedder.tokens, media)
        if self.needs_no_image(regions, cached):
            return self.embed_text(tokens, media)
        kinds = {region.kind for region in regions}
        can_split = self._enabled and ("audio" not in kinds or len(kinds) == 1)
        prompt = split_prompt(tokens, media, regions) if can_split else None
        if prompt is None:
            return _evaluate(self._embedder.embed_prompt(tokens, media))
        try:
            inputs = self._embed_known(prompt, cached)
        except _MISFITS as error:
            inputs = self._embed_misfit(prompt, error)
        return inputs or self._embed_all(prompt)

    def encode_pending(self, inputs: PromptInputs, start: int, stop: int) -> PromptInputs:
        """Encode the pending images in tokens [start, stop). Those before `start` are no longer needed."""
        while (pending := inputs.pending) is not None and pending.runs[pending.first][0] < stop:
            try:
                inputs = self._insert_next(inputs, pending, start)
            except _MISFITS as error:
                return self._embed_misfit(pending.prompt, error)
        return inputs

    def _embed_misfit(self, prompt: ImagePrompt, error: Exception) -> PromptInputs:
        log.warning("the images of a prompt cannot be encoded one by one: %s", error)
        return self._embed_all(prompt)

    def needs_no_image(self, regions: Sequence[MediaRegion], cached: int) -> bool:
        """Whether all images of a prompt lie in its cached tokens, so that none must be encoded."""
        is_computed = not regions or cached >= regions[-1].spans[-1][1]
        return self._enabled and self._verified and is_computed

    def embed_text(self, tokens: Sequence[int], media: Media) -> PromptInputs:
        """What tokens after all images need."""
        return PromptInputs(position_delta=self._embedder.embed_text(tokens, media).position_delta)

    def _embed_known(self, prompt: ImagePrompt, cached: int) -> PromptInputs | None:
        """The prompt's inputs from images that were seen before, or from one image, with others pending; None
        if all images must be encoded together."""
        count, known = self.features.match_prefix(prompt.digests)
        if count == len(prompt.digests) and (len(known) == 1 or self._are_independent(prompt)):
            return self._assemble(prompt, ImageFeatures.concatenate(known))
        runs = prompt.split_places()
        if runs is None or len(runs) < 2:
            return None
        self._check_pairs(prompt, runs)
        count, known = self.features.match_prefix(prompt.digests)
        if not self._are_independent(prompt):
            return None
        if self.needs_no_image(prompt.regions, cached):  # known only now
            return self.embed_text(prompt.tokens, prompt.media)
        if not known:  # one is needed for the type and the width of the embeddings
            count = next(image for image, run in enumerate(runs) if run[-1] >= cached)
            first = self.encode_image(prompt, runs, count)
            known = [*(first.make_blank(len(run)) for run in runs[:count]), first]
            count += 1
        inputs = self._assemble(prompt, ImageFeatures.concatenate(known))
        return replace(inputs, pending=PendingImages(prompt, runs, count) if count < len(runs) else None)

    def _embed_all(self, prompt: ImagePrompt) -> PromptInputs:
        """The model embeds the whole prompt; its features are cached if they can be reused."""
        inputs = _evaluate(self._embedder.embed_prompt(prompt.tokens, prompt.media))
        if not self._enabled or len(prompt.places) == 0 or inputs.embeds is None:
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

    def encode_image(self, prompt: ImagePrompt, runs: Sequence[np.ndarray], image: int) -> ImageFeatures:
        """Features of one image, from the part of the prompt that holds it, or as they were seen before."""
        known = self.features.get((prompt.digests[image],))
        if known is not None:
            return known
        part = prompt.cut(runs, image, image + 1)
        inputs = self._embedder.embed_prompt(part.tokens, part.media)
        features = ImageFeatures.from_prompt(inputs, part.places)
        mx.eval(features.list_arrays())
        self.features.add(part.digests, features)
        return features

    def _are_independent(self, prompt: ImagePrompt) -> bool:
        """Whether the kinds of media that the prompt has are known to be encoded one by one."""
        kinds = {region.kind for region in prompt.regions}
        return bool(kinds) and all(self._independent[kind] for kind in kinds)

    def _check_pairs(self, prompt: ImagePrompt, runs: Sequence[np.ndarray]) -> None:
        """Find out what is not known of the kinds that the prompt has two neighbours of."""
        for at, (one, other) in enumerate(itertools.pairwise(prompt.regions)):
            if one.kind == other.kind and self._independent[one.kind] is None:
                self._independent[one.kind] = self.check_pair(prompt, runs, at)

    def check_pair(self, prompt: ImagePrompt, runs: Sequence[np.ndarray], at: int) -> bool:
        """Whether image or video `at` and the next one have the same features one by one as together. The
        model's own embeddings must also be those assembled from them."""
        try:
            pair = prompt.cut(runs, at, at + 2)
            together = ImageFeatures.from_prompt(self._embed_all(pair), pair.places)
            single = ImageFeatures.concatenate(
                [self.encode_image(prompt, runs, image) for image in (at, at + 1)]
            )
            pairs = zip(single.list_arrays(), together.list_arrays(), strict=True)
            return self._enabled and all(_are_close(a, b) for a, b in pairs)
        except _MISFITS as error:
            log.info("the images of a prompt cannot be encoded one by one: %s", error)
            return False

    def _insert_next(self, inputs: PromptInputs, pending: PendingImages, start: int) -> PromptInputs:
        """The inputs with the features of their first pending image, or none of it if it ends before
        `start`."""
        assert inputs.embeds is not None
        run, embeds = pending.runs[pending.first], inputs.embeds[...]
        if run[-1] < start:
            deepstack = tuple(mx.zeros((len(run), *d.shape[1:]), d.dtype) for d in inputs.deepstack)
        else:
            features = self.encode_image(pending.prompt, pending.runs, pending.first)
            if features.count != len(run):
                raise ValueError(f"{features.count} features of an image for {len(run)} image tokens")
            embeds[0, mx.array(run)] = features.embeddings
            deepstack = features.deepstack
        both = zip(inputs.deepstack, deepstack, strict=True)
        left = pending.first + 1 < len(pending.runs)
        rest = replace(pending, first=pending.first + 1) if left else None
        return _evaluate(
            replace(inputs, embeds=embeds, deepstack=tuple(map(mx.concatenate, both)), pending=rest)
        )

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


def _are_close(one: mx.array, other: mx.array) -> bool:
    """Equal but for rounding, which is coarser in 16-bit types."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    limit = 1e-3 if one.dtype == mx.float32 else 3e-2
    difference, size = mx.abs(one - other).max(), mx.abs(other).max()
    return bool((difference <= limit * size).item())
