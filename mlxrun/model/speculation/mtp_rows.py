"""A prediction head beside the decode batch: the keys of its layer for every row, and its chained drafts.

The head reads pairs: the target's hidden state of a token, and the token after it. A row's keys are those of
its pairs in order: of its prompt, of each token that it gets, and of each accepted one. Tokens from the
prefix cache have no hidden states, so the head does not see them. Of long rows it sees only the newest
tokens. Its predictions are then worse, but answers are the same.

A draft chains predictions, each from the state and the token of the one before. Their keys are after the
row's length, where the next pairs overwrite them. The pairs of decode steps wait, and are read in one forward
when something is drafted. So steps without drafts cost hardly more than without a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlxrun.model.kv.ragged.row_group import round_coarsely
from mlxrun.model.speculation.mtp_head import MTPHead

PLACES, KEPT = 2048, 1024  # the most pairs of a row that the head sees, and those kept when they are more
WAITING = 64  # pairs of a row that wait until a draft needs them, a power of two
ROOM = 256  # places of keys by which the buffers grow at least
SPARSE = 4  # slots for each row, from which on the free ones are dropped
Sample = Callable[[mx.array, int], mx.array]


class SlotCache:
    """Keys and values [slots, places, H, D] of the head's layer, with the members of the libraries' caches.
    int32 [slots]: `counts`, the pairs in each slot, and `offset`, the position of the next one."""

    def __init__(self, keys: mx.array, values: mx.array, counts: mx.array, offset: mx.array) -> None:
        self.keys, self.values, self.counts, self.offset = keys, values, counts, offset

    def make_mask(self, count: int, window: int | None) -> mx.array:
        """The mask [slots, 1, count, places] of `count` new pairs of each row. `window`: pairs that they see,
        None: all."""
        behind = (self.counts[:, None] + mx.arange(count))[..., None] - mx.arange(self.keys.shape[1])
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        return seen[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write new pairs [slots, H, count, D] after each row's. Returns all, [slots, H, places, D]."""
        slots = mx.arange(keys.shape[0])[:, None]
        places = self.counts[:, None] + mx.arange(keys.shape[2])
        self.keys[slots, places] = keys.swapaxes(1, 2)
        self.values[slots, places] = values.swapaxes(1, 2)
        return self.keys.swapaxes(1, 2), self.values.swapaxes(1, 2)


class MTPRows:
    """The head's state of all rows, on the engine thread. Rows have their own cache until they decode, then a
    slot of the buffers.

    `embed`: makes the target's embeddings of tokens; `predict`: makes the target's logits of hidden states.
    `launch_first`: launch a forward before the next one is built, on devices where launching takes the time.
    `compiled`: compile the head's forwards, for each of few shapes.
    """

    def __init__(
        self,
        head: MTPHead,
        embed: Callable[[mx.array], mx.array],
        predict: Callable[[mx.array], mx.array],
        *,
        launch_first: bool = False,
        compiled: bool = False,
    ) -> None:
        compute = partial(_compute, head, embed)
        self._compute = mx.compile(compute) if compiled else compute
        self._head = head
        self._embed = embed
        self._predict = predict
        self._launch_first = launch_first
        self._prompts: dict[str, Any] = {}
        self.cache = make_head_cache()  # of one pair, for its shapes
        head(embed(mx.array([[0]])), mx.zeros((1, 1, head.width)), None, self.cache)
        mx.eval(self.cache.keys, self.cache.values)
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._prompts.clear()
        self._slots: dict[str, int] = {}
        self._forget_buffers()

    def _forget_buffers(self) -> None:
        self._lengths: list[int] = []  # pairs whose keys are in the slot
        self._bases: list[int] = []  # pairs before them, which were dropped
        self._waiting: list[int] = []  # pairs that wait, by slot
        self._buffers: tuple[mx.array, mx.array] | None = None  # keys and values
        # Those pairs: hidden states [slots, WAITING, D] and tokens.
        self._pairs: tuple[mx.array, mx.array] | None = None
        self._output: tuple[mx.array, mx.array] | None = None  # [slots, 1, D], of each row's newest pair

    def keep_only(self, request_ids: Collection[str]) -> None:
        """Forget all other rows."""
        for request_id in self._prompts.keys() - request_ids:
            del self._prompts[request_id]
        for request_id in self._slots.keys() - request_ids:
            slot = self._slots.pop(request_id)
            self._lengths[slot] = self._waiting[slot] = self._bases[slot] = 0
        if not self._slots:
            self._forget_buffers()

    def read_prompt(self, request_id: str, hidden: mx.array, tokens: Sequence[int] | mx.array) -> None:
        """Take in pairs of a row that does not decode yet: `hidden` [n, D], and the n tokens after them."""
        if hidden.shape[0]:
            cache = self._prompts.setdefault(request_id, make_head_cache())
            window = self._head.window
            mask = cache.make_mask(hidden.shape[0], return_array=True, window_size=window)
            self._head(self._embed(mx.array(tokens)[None]), hidden[None], mask, cache)

    def read_step(
        self,
        request_ids: Sequence[str],
        hidden: mx.array,
        tokens: mx.array,
        counts: Sequence[int] | None = None,
        kept: Sequence[int] | None = None,
    ) -> None:
        """Take in the pairs of a decode step of these rows, which are all that decode. `hidden` [sum of
        counts, D]: of the step's tokens; `tokens`: as many, sampled after each. Row i has `counts[i]` tokens
        (default 1), of which the first `kept[i]` are accepted (default: all)."""
        counts = counts or [1] * len(request_ids)
        kept = kept or counts
        most = max(kept)
        self.keep_only({*request_ids, *self._prompts})
        self._place_rows(request_ids)
        if max(self._waiting) + most > WAITING:
            self._read_waiting()
        if self._pairs is None:
            shape = len(self._lengths), WAITING
            self._pairs = mx.zeros((*shape, hidden.shape[-1]), hidden.dtype), mx.zeros(shape, mx.int32)
        picked = [[0] * most] * len(self._lengths)
        places = list(self._waiting)
        starts = itertools.accumulate(counts, initial=0)
        for request_id, start, size in zip(request_ids, starts, kept, strict=False):
            slot = self._slots[request_id]
            picked[slot] = [start + min(i, size - 1) for i in range(most)]
            self._waiting[slot] += size
        index, slots = mx.array(picked), mx.arange(len(picked))[:, None]
        for buffer, array in zip(self._pairs, (hidden, tokens), strict=True):
            buffer[slots, mx.array(places)[:, None] + mx.arange(most)] = array[index].astype(buffer.dtype)
        if self._launch_first and kept is not counts:  # the next step drafts too, more often than not
            self._read_waiting()
            mx.async_eval(self._output)

    def is_ready(self, request_id: str) -> bool:
        """Whether the row decodes, so that `draft` can predict its next tokens."""
        return request_id in self._slots

    def draft(self, limits: Mapping[str, int], sample: Sample | None = None) -> dict[str, tuple[int, ...]]:
        """The predicted tokens by row, as many as `limits` says. Waits for the device once. `sample`: makes
        tokens [rows] of logits [rows, V] and the place in the draft; None: the likeliest ones."""
        if any(self._waiting):
            self._read_waiting()
        assert self._output is not None
        depth = max(limits.values())
        self._make_room(depth)
        places = {self._slots[rid]: place for place, rid in enumerate(limits)}
        slots = mx.array(list(places))
        by_slot = mx.array([places.get(slot, 0) for slot in range(len(self._lengths))])
        normed, chained = self._output
        drafted: list[mx.array] = []
        while True:
            logits = self._predict(normed[slots])[:, 0]
            drafted.append(mx.argmax(logits, axis=-1) if sample is None else sample(logits, len(drafted)))
            if len(drafted) == depth:
                break
            if self._launch_first:
                mx.async_eval(drafted[-1])
            ends = [length + len(drafted) - 1 for length in self._lengths]
            normed, chained = self.run_forward(drafted[-1][by_slot][:, None], chained, ends)
        found: list[list[int]] = mx.stack(drafted, axis=1).tolist()
        return {rid: tuple(row[:limit]) for (rid, limit), row in zip(limits.items(), found, strict=True)}

    def list_arrays(self) -> list[mx.array]:
        """The arrays to evaluate in each step, since nothing else consumes them."""
        prompts = [array for cache in self._prompts.values() for array in (cache.keys, cache.values)]
        return [*prompts, *(self._buffers or ()), *(self._pairs or ())]

    # -- buffers ----------------------------------------------------------------------------------------

    def run_forward(
        self, tokens: mx.array, hidden: mx.array, lengths: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """The head's output for pairs [slots, n] behind so many of each slot."""
        assert self._buffers is not None
        buffers, self._buffers = self._buffers, None  # so that the forward may write in place
        counts, bases = (mx.array(each, dtype=mx.int32) for each in (lengths, self._bases))
        normed, chained, keys, values = self._compute(tokens, hidden, counts, counts + bases, *buffers)
        self._buffers = keys, values
        return normed, chained

    def _read_waiting(self) -> None:
        """Let the head read the pairs that wait, in one forward of one of few widths."""
        assert self._pairs is not None
        width = 1 << (max(self._waiting) - 1).bit_length()
        self._make_room(width)
        hidden, tokens = (buffer[:, :width] for buffer in self._pairs)
        normed, chained = self.run_forward(tokens, hidden, self._lengths)
        slots = mx.arange(len(self._lengths))[:, None]
        ends = mx.array([max(count - 1, 0) for count in self._waiting])[:, None]
        self._output = normed[slots, ends], chained[slots, ends]
        self._lengths = [n + count for n, count in zip(self._lengths, self._waiting, strict=True)]
        self._waiting = [0] * len(self._waiting)

    def _place_rows(self, request_ids: Sequence[str]) -> None:
        """Give a slot to each row that has none, with the keys of its prompt."""
        joining = [rid for rid in request_ids if rid not in self._slots]
        if len(self._lengths) >= max(SPARSE * len(request_ids), SPARSE):
            self._compact()
        taken = set(self._slots.values())
        free = (slot for slot in itertools.count() if slot not in taken)
        self._slots |= dict(zip(joining, free, strict=False))
        slots = 1 << max(self._slots.values()).bit_length()
        self._lengths += [0] * (slots - len(self._lengths))
        self._waiting += [0] * (slots - len(self._waiting))
        self._bases += [0] * (slots - len(self._bases))
        prompts = {self._slots[rid]: self._prompts.pop(rid) for rid in joining if rid in self._prompts}
        for slot, cache in prompts.items():
            self._lengths[slot] = cache.offset
        self._make_room(0)
        assert self._buffers is not None
        for slot, cache in prompts.items():
            for buffer, array in zip(self._buffers, (cache.keys, cache.values), strict=True):
                buffer[slot, : cache.offset] = array[0, :, : cache.offset].swapaxes(0, 1)

    def _compact(self) -> None:
        """Drop the slots that are free."""
        used = list(self._slots.values())
        if used and self._buffers is not None and self._pairs is not None:
            keys, values, hidden, tokens = (a[mx.array(used)] for a in (*self._buffers, *self._pairs))
            self._buffers, self._pairs = (keys, values), (hidden, tokens)
        self._lengths = [self._lengths[slot] for slot in used]
        self._waiting = [self._waiting[slot] for slot in used]
        self._bases = [self._bases[slot] for slot in used]
        self._slots = {rid: slot for slot, rid in enumerate(self._slots)}

    def _make_room(self, count: int) -> None:
        """Let the buffers have all slots, and room for `count` more pairs of each row. Rows that have too
        many keep the newest."""
        if self._buffers is not None:
            for slot, length in enumerate(self._lengths):
                if length + count > PLACES:
                    for buffer in self._buffers:
                        buffer[slot, :KEPT] = buffer[slot, length - KEPT : length]
                    self._bases[slot] += length - KEPT
                    self._lengths[slot] = KEPT
        places = round_coarsely(max(max(self._lengths) + count, 1), ROOM)
        if self._buffers is None:
            like = (self.cache.keys, self.cache.values)
            shapes = [(len(self._lengths), places, a.shape[1], a.shape[3]) for a in like]
            keys, values = (mx.zeros(s, a.dtype) for s, a in zip(shapes, like, strict=True))
            self._buffers = keys, values
        slots = len(self._lengths)
        keys, values = (_enlarge(buffer, slots, places) for buffer in self._buffers)
        self._buffers = keys, values
        if self._pairs is not None:
            hidden, tokens = (_enlarge(buffer, slots, WAITING) for buffer in self._pairs)
            self._pairs = hidden, tokens


def _compute(
    head: MTPHead,
    embed: Callable[[mx.array], mx.array],
    tokens: mx.array,
    hidden: mx.array,
    counts: mx.array,
    offset: mx.array,
    keys: mx.array,
    values: mx.array,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The head's output for pairs [slots, n], and its keys and values with them: a function of arrays, which
    can be compiled."""
    cache = SlotCache(keys, values, counts, offset)
    normed, chained = head(embed(tokens), hidden, cache.make_mask(tokens.shape[1], head.window), cache)
    return normed, chained, cache.keys, cache.values


def make_head_cache() -> Any:
    """An empty cache of one row for the head's layer."""
    from mlx_lm.models.cache import KVCache

    return KVCache()


def _enlarge(buffer: mx.array, slots: int, places: int) -> mx.array:
    missing = max(slots - buffer.shape[0], 0), max(places - buffer.shape[1], 0)
    more = [(0, count) for count in missing] + [(0, 0)] * (buffer.ndim - 2)
    return mx.pad(buffer, more) if any(missing) else buffer
