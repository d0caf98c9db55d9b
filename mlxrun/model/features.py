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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.inputs import Inputs
from mlxrun.model.pixels import Media, Units, cut

log = logging.getLogger(__name__)

Compute = Callable[[Sequence[int], Media], Inputs]  # all of a prompt, the tower included
Text = Callable[[Sequence[int], Media], Inputs]  # the same but for embeddings and deepstack of image tokens


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Image tokens: embeddings [n, D], and deepstack features of the same tokens; memory of their own."""

    rows: mx.array
    deepstack: tuple[mx.array, ...]

    @staticmethod
    def of(inputs: Inputs, places: np.ndarray, first: int = 0) -> Seen:
        """What lies at these places of a prompt; they are its image tokens from number `first` on."""
        assert inputs.embeds is not None
        numbers = mx.arange(first, first + len(places))
        return Seen(inputs.embeds[0, mx.array(places)], tuple(d[numbers] for d in inputs.deepstack))

    @staticmethod
    def joined(parts: Sequence[Seen]) -> Seen:
        if len(parts) == 1:
            return parts[0]
        layers = zip(*(part.deepstack for part in parts), strict=True)
        return Seen(mx.concatenate([p.rows for p in parts]), tuple(mx.concatenate(layer) for layer in layers))

    @property
    def count(self) -> int:
        return int(self.rows.shape[0])

    def arrays(self) -> list[mx.array]:
        return [self.rows, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


class Features:
    """What was seen, least recently used first out. Keys are the digests of one or more images in order."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self._kept: OrderedDict[tuple[bytes, ...], Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, names: Sequence[bytes]) -> Seen | None:
        found = self._kept.get(tuple(names))
        if found is not None:
            self._kept.move_to_end(tuple(names))
        return found

    def put(self, names: Sequence[bytes], seen: Seen) -> None:
        """Keep it if it fits at all; its arrays are evaluated."""
        old = self._kept.pop(tuple(names), None)
        self.nbytes -= 0 if old is None else old.nbytes
        if seen.nbytes > self.budget:
            return
        self._kept[tuple(names)] = seen
        self.nbytes += seen.nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes

    def beginning(self, names: Sequence[bytes]) -> tuple[int, list[Seen]]:
        """How many of the first images are known, and what is known of them."""
        reached, found = 0, []
        while reached < len(names):
            stops = range(len(names), reached, -1)
            stop = next((s for s in stops if tuple(names[reached:s]) in self._kept), None)
            if stop is None:
                break
            seen = self.get(names[reached:stop])
            assert seen is not None
            found.append(seen)
            reached = stop
        return reached, found


class ImagePrompts:
    """Embeds prompts of one model. `token`: what stands for an image; None if the model has none."""

    def __init__(
        self, compute: Compute, text: Text, token: int | None, budget: int, whole_sets: bool = False
    ) -> None:
        self._compute, self._text, self._token = compute, text, token
        self.features = Features(budget)
        self._on = budget > 0 and token is not None
        self._proven = False  # that parts give the whole
        self._alone: bool | None = False if whole_sets else None  # that the tower looks at each image alone

    def inputs(self, prompt: Sequence[int], media: Media, computed: int = 0) -> Inputs:
        """`computed`: so many tokens are in the row's cache already, and nothing will be asked of them."""
        units = cut(media) if self._on else None
        if units is None:
            return _evaluated(self._compute(prompt, media))
        places = np.flatnonzero(np.array(prompt) == self._token)
        if self._proven and (len(places) == 0 or computed > places[-1]):
            return Inputs(delta=self._text(prompt, media).delta)
        names = units.names()
        reached, known = self.features.beginning(names)
        if reached == len(names) and (len(known) == 1 or self._alone):
            return self._put_together(prompt, media, places, Seen.joined(known))
        if known and self._alone:
            rest = self._look(prompt, units, reached, places[sum(s.count for s in known) :])
            seen = Seen.joined([*known, rest])
            self._keep(names[reached:], rest, prompt, places[-rest.count :])
            return self._put_together(prompt, media, places, seen)
        return self._computed(prompt, media, places, units, known if reached < len(names) else [])

    def _computed(
        self, prompt: Sequence[int], media: Media, places: np.ndarray, units: Units, known: list[Seen]
    ) -> Inputs:
        inputs = _evaluated(self._compute(prompt, media))
        if len(places) == 0 or inputs.embeds is None:
            return inputs
        seen = Seen.of(inputs, places)
        if not _equal(self._put_together(prompt, media, places, seen), inputs):
            log.info("image features of this model are not kept: they do not come back as they were")
            self._on = False
            return inputs
        self._proven = True
        if known and self._alone is None:
            self._alone = self._looks_alone(prompt, units, places, known, seen)
        self._keep(units.names(), seen, prompt, places)
        return inputs

    def _keep(self, names: Sequence[bytes], seen: Seen, prompt: Sequence[int], places: np.ndarray) -> None:
        mx.eval(seen.arrays())
        runs = np.split(np.arange(len(places)), np.flatnonzero(np.diff(places) > 1) + 1)
        if not self._alone or len(runs) != len(names):
            self.features.put(names, seen)
            return
        for name, run in zip(names, runs, strict=True):
            numbers = mx.array(run)
            own = Seen(seen.rows[numbers], tuple(d[numbers] for d in seen.deepstack))
            mx.eval(own.arrays())
            self.features.put([name], own)

    def _looks_alone(
        self, prompt: Sequence[int], units: Units, places: np.ndarray, known: list[Seen], seen: Seen
    ) -> bool:
        """Whether images give the same without the others: those known from before, and the rest."""
        count = sum(s.count for s in known)
        first = len(units.media) - self._unknown(units)
        if count >= len(places):
            return False
        try:
            rest = self._look(prompt, units, first, places[count:])
        except (ValueError, TypeError, IndexError, KeyError) as error:
            log.info("the images of a prompt cannot be looked at one by one: %s", error)
            return False
        again = Seen.joined([*known, rest])
        return all(_close(a, b) for a, b in zip(again.arrays(), seen.arrays(), strict=True))

    def _unknown(self, units: Units) -> int:
        return len(units.media) - self.features.beginning(units.names())[0]

    def _look(self, prompt: Sequence[int], units: Units, first: int, places: np.ndarray) -> Seen:
        """Image tokens of the units from `first` on, from the part of the prompt that they are in."""
        start, stop = int(places[0]) - 1, int(places[-1]) + 2
        part = self._compute(prompt[max(start, 0) : stop], units.joined(first))
        return Seen.of(part, places - max(start, 0))

    def _put_together(
        self, prompt: Sequence[int], media: Media, places: np.ndarray, seen: Seen
    ) -> Inputs:
        text = self._text(prompt, media)
        assert text.embeds is not None
        if seen.count != len(places):
            raise ValueError(f"{seen.count} image features for {len(places)} image tokens")
        embeds = text.embeds[...]
        embeds[0, mx.array(places)] = seen.rows
        visual = np.zeros(len(prompt), dtype=np.bool_)
        visual[places] = True
        return _evaluated(
            Inputs(
                embeds=embeds,
                positions=text.positions,
                delta=text.delta,
                visual=visual if seen.deepstack else None,
                deepstack=seen.deepstack,
                per_layer=text.per_layer,
            )
        )


def _evaluated(inputs: Inputs) -> Inputs:
    mx.eval(inputs.arrays())
    return inputs


def _equal(one: Inputs, other: Inputs) -> bool:
    """Bit by bit; the mask counts only where there is something that it is for."""
    ours, theirs = one.arrays(), other.arrays()
    masks = [None if i.visual is None else i.visual.tolist() for i in (one, other)]
    return (
        one.delta == other.delta
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
