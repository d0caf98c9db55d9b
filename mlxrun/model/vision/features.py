"""Embeds prompts with images without encoding the same image twice.

The features of image tokens are cached by a digest of the processed pixels, and prompts are assembled from
them and from the embeddings of the text. No model is trusted: features are cached only if the assembled
prompt equals the model's own bit by bit. Images of another set are reused if the vision tower encodes each
independently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from cachetools import LRUCache

from mlxrun.model.prompt_inputs import PromptInputs
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.image_units import ImageUnits, Media, split_images

log = logging.getLogger(__name__)

_MISFITS = (ValueError, TypeError, IndexError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Embeddings [n, D] of image tokens, and their deepstack features, in memory of their own."""

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

    def take(self, rows: mx.array) -> ImageFeatures:
        """A copy of some of the image tokens."""
        return ImageFeatures(self.embeddings[rows], tuple(d[rows] for d in self.deepstack))

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


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """A prompt with images. `places`: the indices of all its image tokens; `digests`: one a unit."""

    tokens: Sequence[int]
    media: Media
    units: ImageUnits
    digests: Sequence[bytes]
    places: np.ndarray


class ImagePromptEmbedder:
    """Embeds prompts of one model. `budget`: bytes of features that are cached; 0: none."""

    def __init__(self, embedder: Embedder, budget: int, exact_sets_only: bool = False) -> None:
        self._embedder = embedder
        self.features = FeatureCache(budget)
        self._enabled = budget > 0 and embedder.image_token is not None
        self._verified = False  # assembled prompts equal those of the model
        # Whether the vision tower encodes each image independently of the others; None: not known yet.
        self._independent: bool | None = False if exact_sets_only else None

    def embed(self, tokens: Sequence[int], media: Media, cached: int = 0) -> PromptInputs:
        """`cached`: tokens that are in the row's cache already, which need no embeddings."""
        units = split_images(media) if self._enabled else None
        if units is None:
            return _evaluate(self._embedder.embed_prompt(tokens, media))
        places = np.flatnonzero(np.array(tokens) == self._embedder.image_token)
        if self._verified and (len(places) == 0 or cached > places[-1]):
            return PromptInputs(position_delta=self._embedder.embed_text(tokens, media).position_delta)
        prompt = ImagePrompt(tokens, media, units, units.compute_digests(), places)
        count, known = self.features.match_prefix(prompt.digests)
        if (count == len(prompt.digests) and len(known) == 1) or (known and self._independent):
            try:
                return self._reuse(prompt, count, known)
            except _MISFITS as error:
                log.warning("cached image features of a prompt cannot be used: %s", error)
                known = []
        return self._embed_all(prompt, count, known)

    def _reuse(self, prompt: ImagePrompt, count: int, known: Sequence[ImageFeatures]) -> PromptInputs:
        """Assemble a prompt from the features of its first `count` images; the model encodes the others."""
        if count < len(prompt.digests):
            rest = self._encode_rest(prompt, count, known)
            self._store(prompt.digests[count:], rest, prompt.places[-rest.count :])
            known = [*known, rest]
        return self._assemble(prompt, ImageFeatures.concatenate(known))

    def _embed_all(self, prompt: ImagePrompt, count: int, known: Sequence[ImageFeatures]) -> PromptInputs:
        """The model embeds the whole prompt; its features are cached if they can be reused."""
        inputs = _evaluate(self._embedder.embed_prompt(prompt.tokens, prompt.media))
        if len(prompt.places) == 0 or inputs.embeds is None:
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
        if known and self._independent is None and count < len(prompt.digests):
            self._independent = self._check_independence(prompt, count, known, features)
        self._store(prompt.digests, features, prompt.places)
        return inputs

    def _store(self, digests: Sequence[bytes], features: ImageFeatures, places: np.ndarray) -> None:
        mx.eval(features.list_arrays())
        runs = np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) > 1) + 1)
        if not self._independent or len(runs) != len(digests):
            self.features.add(digests, features)
            return
        for digest, run in zip(digests, runs, strict=True):
            own = features.take(mx.array(run))
            mx.eval(own.list_arrays())
            self.features.add([digest], own)

    def _check_independence(
        self, prompt: ImagePrompt, count: int, known: Sequence[ImageFeatures], features: ImageFeatures
    ) -> bool:
        """Whether images have the same features without the others: the `known` ones, and the rest."""
        try:
            again = ImageFeatures.concatenate([*known, self._encode_rest(prompt, count, known)])
            pairs = zip(again.list_arrays(), features.list_arrays(), strict=True)
            return all(_are_close(a, b) for a, b in pairs)
        except _MISFITS as error:
            log.info("the images of a prompt cannot be encoded one by one: %s", error)
            return False

    def _encode_rest(self, prompt: ImagePrompt, count: int, known: Sequence[ImageFeatures]) -> ImageFeatures:
        """Features of all but the first `count` images, from the part of the prompt that holds them."""
        places = prompt.places[sum(features.count for features in known) :]
        start, stop = max(int(places[0]) - 1, 0), int(places[-1]) + 2
        inputs = self._embedder.embed_prompt(prompt.tokens[start:stop], prompt.units.concatenate_from(count))
        return ImageFeatures.from_prompt(inputs, places - start)

    def _assemble(self, prompt: ImagePrompt, features: ImageFeatures) -> PromptInputs:
        """The prompt's inputs from the embeddings of its text and the features of its images."""
        text = self._embedder.embed_text(prompt.tokens, prompt.media)
        assert text.embeds is not None
        if features.count != len(prompt.places):
            raise ValueError(f"{features.count} image features for {len(prompt.places)} image tokens")
        embeds = text.embeds.astype(features.embeddings.dtype)[...]
        embeds[0, mx.array(prompt.places)] = features.embeddings
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
