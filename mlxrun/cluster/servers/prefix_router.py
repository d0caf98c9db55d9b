"""Chooses the worker for a request of a server: one that has computed the longest prefix of its prompt.

A prompt is cut at the ends of its messages, and in long texts every BLOCK bytes. A worker owns the prefixes
of its requests, so the turns of a conversation stay on one worker. Of several owners, the one with the least
load is chosen. If it has SPILL more load than the least loaded worker, the request goes there, and that
worker owns the prefix too. So a prompt that everybody shares is soon on all workers.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from mlxrun.jobs.lines.lookahead import iterate_texts

BLOCK = 1024  # bytes
SHORTEST = 64  # bytes of a prefix that is worth computing at one place
MOST_PREFIXES = 256  # of one prompt
MOST_TEXTS = 4096  # that are read of a message; token ids are a text each
REMEMBERED = 65_536  # prefixes
SPILL = 0.25  # of the requests that a worker computes at once


class PrefixRouter:
    """The owners of prefixes. Workers are numbers."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, set[int]] = OrderedDict()
        self._given: Counter[int] = Counter()  # requests of each worker, so that idle ones take turns

    def choose(self, prefixes: Sequence[bytes], loads: Mapping[int, float]) -> int:
        """Choose the worker for a prompt with these prefixes. `loads`: each worker's requests divided by
        those that it computes at once; not empty."""
        least = min(loads, key=lambda number: (loads[number], self._given[number], number))
        for prefix in reversed(prefixes):
            if owners := self._owners.get(prefix, set()) & loads.keys():
                owner = min(owners, key=lambda number: (loads[number], number))
                if loads[owner] < loads[least] + SPILL:
                    return owner
                break
        return least

    def record(self, prefixes: Sequence[bytes], worker: int) -> None:
        """Record that a worker computes a prompt with these prefixes."""
        self._given[worker] += 1
        for prefix in prefixes:
            self._owners.setdefault(prefix, set()).add(worker)
            self._owners.move_to_end(prefix)
        while len(self._owners) > REMEMBERED:
            self._owners.popitem(last=False)

    def remove_worker(self, worker: int) -> None:
        """Forget what a worker had computed, as it has ended."""
        for owners in self._owners.values():
            owners.discard(worker)
        self._given[worker] = max(self._given.values(), default=0)  # its successor gets no more than others


def hash_prefixes(body: Mapping[str, Any]) -> list[bytes]:
    """Digest the prefixes of a request's prompt, the shortest first; none for a body without a prompt."""
    turns = body.get("messages", body.get("input", body.get("prompt")))
    parts: Collection[Any] = turns if isinstance(turns, list) else [turns]
    head = [body.get(name) for name in ("tools", "system", "instructions")]
    model = str(body.get("model")).encode("utf-8", "surrogatepass")
    rolling, length = hashlib.blake2b(model, digest_size=12), 0
    found: list[bytes] = []
    for part in (*head, *parts):
        for text in islice(iterate_texts(part), MOST_TEXTS):
            data = text[: MOST_PREFIXES * BLOCK].encode("utf-8", "surrogatepass")
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                rolling.update(block)
                length += len(block)
                if len(block) == BLOCK:
                    found.append(rolling.digest())
            if len(found) >= MOST_PREFIXES:
                return found[:MOST_PREFIXES]
        if part is not None and length >= SHORTEST:
            found.append(rolling.digest())
    return found[:MOST_PREFIXES]
