"""Prompts with images as embeddings, without looking twice at the same image.

Kept are the embeddings of image tokens (and their deepstack features), by a digest of the processed pixels,
within a budget of bytes. A prompt is put together from them and from the text's own embeddings; positions are
always those of the request itself. Nothing is assumed of a model: each time that it has computed a prompt,
the same is put together from the parts, and only if both are equal bit by bit are the parts kept. So this
serves every model of mlx-vlm that scatters image features into embeddings, and no other is harmed.

Images that were seen as part of another set serve too if the tower looks at each alone. That is found out
once a model, at the first prompt where it would help; there the results are compared with a tolerance, as a
tower rounds differently in other batches. `whole_sets` rules it out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlxrun.model.prompt_inputs import PromptInputs
from mlxrun.model.vision.image_units import ImageUnits, Media, split_images

log = logging.getLogger(__name__)

_MISFITS = (ValueError, TypeError, IndexError, KeyError, AttributeError)


class Embeds(Protocol):
    """How a model embeds prompts: model/vision/embedder.py."""

    image_token: int | None

    def whole(self, prompt: Sequence[int], media: Media) -> PromptInputs:
        """All of it, by way of the vision tower."""
        ...

    def text(self, prompt: Sequence[int], media: Media) -> PromptInputs:
        """The same but for the embeddings and deepstack features of image tokens."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Image tokens: embeddings [n, D], and deepstack features of the same tokens; memory of their own."""

    embeddings: mx.array
    deepstack: tuple[mx.array, ...]

    @staticmethod
    def from_prompt(inputs: PromptInputs, places: np.ndarray) -> ImageFeatures:
        """What lies at these places of a prompt, which are all its image tokens."""
        assert inputs.embeds is not None
        numbers = mx.arange(len(places))  # gathering copies: nothing else is held on to
        return ImageFeatures(inputs.embeds[0, mx.array(places)], tuple(d[numbers] for d in inputs.deepstack))

    @staticmethod
    def concatenate(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        if len(parts) == 1:
            return parts[0]
        layers = zip(*(part.deepstack for part in parts), strict=True)
        return ImageFeatures(
            mx.concatenate([p.embeddings for p in parts]), tuple(mx.concatenate(layer) for layer in layers)
        )

    @property
    def count(self) -> int:
        return int(self.embeddings.shape[0])

    def list_arrays(self) -> list[mx.array]:
        return [self.embeddings, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.list_arrays())


class FeatureCache:
    """What was seen, least recently used first out. Keys are the digests of one or more images in order."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._entries: OrderedDict[tuple[bytes, ...], ImageFeatures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, names: Sequence[bytes]) -> ImageFeatures | None:
        found = self._entries.get(tuple(names))
        if found is not None:
            self._entries.move_to_end(tuple(names))
        return found

    def add(self, names: Sequence[bytes], seen: ImageFeatures) -> None:
        """Keep it if it fits at all; its arrays are evaluated."""
        old = self._entries.pop(tuple(names), None)
        self.nbytes -= 0 if old is None else old.nbytes
        if seen.nbytes > self.budget:
            return
        self._entries[tuple(names)] = seen
        self.nbytes += seen.nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self._entries.popitem(last=False)[1].nbytes

    def match_prefix(self, names: Sequence[bytes]) -> tuple[int, list[ImageFeatures]]:
        """How many of the first images are known, and what is known of them."""
        reached, found = 0, []
        while reached < len(names):
            stops = range(len(names), reached, -1)
            stop = next((s for s in stops if tuple(names[reached:s]) in self._entries), None)
            if stop is None:
                break
            seen = self.get(names[reached:stop])
            assert seen is not None
            found.append(seen)
            reached = stop
        return reached, found


class ImagePromptEmbedder:
    """Embeds prompts of one model. `budget`: bytes of features that are kept; 0: none."""

    def __init__(self, embeds: Embeds, budget: int, whole_sets: bool = False) -> None:
        self._embeds = embeds
        self.features = FeatureCache(budget)
        self._on = budget > 0 and embeds.image_token is not None
        self._proven = False  # that parts give the whole
        self._alone: bool | None = False if whole_sets else None  # that the tower looks at each image alone

    def embed(self, prompt: Sequence[int], media: Media, computed: int = 0) -> PromptInputs:
        """`computed`: so many tokens are in the row's cache already, and nothing will be asked of them."""
        units = split_images(media) if self._on else None
        if units is None:
            return _evaluated(self._embeds.whole(prompt, media))
        places = np.flatnonzero(np.array(prompt) == self._embeds.image_token)
        if self._proven and (len(places) == 0 or computed > places[-1]):
            return PromptInputs(position_delta=self._embeds.text(prompt, media).position_delta)
        names = units.compute_digests()
        reached, known = self.features.match_prefix(names)
        if (reached == len(names) and len(known) == 1) or (known and self._alone):
            try:
                return self._reused(prompt, media, units, names, places, reached, known)
            except _MISFITS as error:
                log.warning("images of a prompt are looked at again: %s", error)
                known = []
        return self._looked_at(prompt, media, units, names, places, reached, known)

    def _reused(
        self,
        prompt: Sequence[int],
        media: Media,
        units: ImageUnits,
        names: Sequence[bytes],
        places: np.ndarray,
        reached: int,
        known: Sequence[ImageFeatures],
    ) -> PromptInputs:
        """From what is known of the first images; the others are looked at."""
        if reached < len(names):
            others = places[sum(seen.count for seen in known) :]
            rest = self._look(prompt, units, reached, others)
            self._keep(names[reached:], rest, others)
            known = [*known, rest]
        return self._put_together(prompt, media, places, ImageFeatures.concatenate(known))

    def _looked_at(
        self,
        prompt: Sequence[int],
        media: Media,
        units: ImageUnits,
        names: Sequence[bytes],
        places: np.ndarray,
        reached: int,
        known: Sequence[ImageFeatures],
    ) -> PromptInputs:
        """All of it by the model; and what was seen is kept if it serves."""
        inputs = _evaluated(self._embeds.whole(prompt, media))
        if len(places) == 0 or inputs.embeds is None:
            return inputs
        try:
            seen = ImageFeatures.from_prompt(inputs, places)
            self._on = _equal(self._put_together(prompt, media, places, seen), inputs)
        except _MISFITS as error:
            log.debug("a prompt cannot be put together: %s", error)
            self._on = False
        if not self._on:
            log.info("image features of this model are not kept: they would not come back as they were")
            return inputs
        self._proven = True
        if known and self._alone is None and reached < len(names):
            self._alone = self._looks_alone(prompt, units, places, reached, known, seen)
        self._keep(names, seen, places)
        return inputs

    def _keep(self, names: Sequence[bytes], seen: ImageFeatures, places: np.ndarray) -> None:
        mx.eval(seen.list_arrays())
        runs = np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) > 1) + 1)
        if not self._alone or len(runs) != len(names):
            self.features.add(names, seen)
            return
        for name, run in zip(names, runs, strict=True):
            numbers = mx.array(run)
            own = ImageFeatures(seen.embeddings[numbers], tuple(d[numbers] for d in seen.deepstack))
            mx.eval(own.list_arrays())
            self.features.add([name], own)

    def _looks_alone(
        self,
        prompt: Sequence[int],
        units: ImageUnits,
        places: np.ndarray,
        reached: int,
        known: Sequence[ImageFeatures],
        seen: ImageFeatures,
    ) -> bool:
        """Whether images give the same without the others: those known from before, and the rest."""
        try:
            rest = self._look(prompt, units, reached, places[sum(s.count for s in known) :])
            again = ImageFeatures.concatenate([*known, rest])
            return all(_close(a, b) for a, b in zip(again.list_arrays(), seen.list_arrays(), strict=True))
        except _MISFITS as error:
            log.info("the images of a prompt cannot be looked at one by one: %s", error)
            return False

    def _look(
        self, prompt: Sequence[int], units: ImageUnits, first: int, places: np.ndarray
    ) -> ImageFeatures:
        """Image tokens of the units from `first` on, from the part of the prompt that they are in."""
        start, stop = max(int(places[0]) - 1, 0), int(places[-1]) + 2
        return ImageFeatures.from_prompt(
            self._embeds.whole(prompt[start:stop], units.concatenate_from(first)), places - start
        )

    def _put_together(
        self, prompt: Sequence[int], media: Media, places: np.ndarray, seen: ImageFeatures
    ) -> PromptInputs:
        text = self._embeds.text(prompt, media)
        assert text.embeds is not None
        if seen.count != len(places):
            raise ValueError(f"{seen.count} image features for {len(places)} image tokens")
        embeds = text.embeds.astype(seen.embeddings.dtype)[...]
        embeds[0, mx.array(places)] = seen.embeddings
        visual = np.zeros(len(prompt), dtype=np.bool_)
        visual[places] = True
        return _evaluated(
            PromptInputs(
                embeds=embeds,
                positions=text.positions,
                position_delta=text.position_delta,
                visual_mask=visual if seen.deepstack else None,
                deepstack=seen.deepstack,
                per_layer=text.per_layer,
            )
        )


def _evaluated(inputs: PromptInputs) -> PromptInputs:
    mx.eval(inputs.list_arrays())
    return inputs


def _equal(one: PromptInputs, other: PromptInputs) -> bool:
    """Bit by bit; the mask counts only where there is something that it is for."""
    ours, theirs = one.list_arrays(), other.list_arrays()
    masks = [None if i.visual_mask is None else i.visual_mask.tolist() for i in (one, other)]
    return (
        one.position_delta == other.position_delta
        and (not other.deepstack or masks[0] == masks[1])
        and len(ours) == len(theirs)
        and all(
            a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b, equal_nan=True).item()
            for a, b in zip(ours, theirs, strict=True)
        )
    )


def _close(one: mx.array, other: mx.array) -> bool:
    """Equal but for rounding, of 16-bit arithmetic if need be."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    limit = 1e-3 if one.dtype == mx.float32 else 3e-2
    off, size = mx.abs(one - other).max(), mx.abs(other).max()
    return bool((off <= limit * size).item())
