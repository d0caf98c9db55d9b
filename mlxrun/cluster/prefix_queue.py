"""The lines that wait for a worker, by prefix: a worker gets lines whose prefix it has computed.

A *prefix group* is the lines with equal prefix hashes (lookahead.py). A worker that had a line of a group
owns the group, perhaps with other owners. A worker gets the oldest of its own groups. Without one it gets a
group without owner, first one with the system prompt of its last line. If it would idle otherwise, it gets
the oldest group of all, and owns that too from then on.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

REMEMBERED = 65_536  # groups whose owners are known while none of their lines waits

T = TypeVar("T")
_Groups = OrderedDict[int, None]  # prefix hashes, oldest first


class PrefixQueue(Generic[T]):
    """Waiting items by prefix hash. Owners are worker numbers. All calls take constant time, except
    `remove_worker`."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, deque[T]] = OrderedDict()
        self._free: _Groups = OrderedDict()  # groups that wait and that nobody owns
        self._free_by_system: dict[int, _Groups] = {}
        self._owned: dict[int, _Groups] = {}  # groups that wait, by owner
        self._owners: OrderedDict[int, set[int]] = OrderedDict()
        self._last_system: dict[int, int] = {}  # by worker
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, prefix: int, item: T, *, first: bool = False) -> None:
        """Add an item behind those of its group. With `first`, add it before all others."""
        self._size += 1
        if prefix not in self._waiting:
            self._waiting[prefix] = deque()
            self._enter(prefix)
        if first:
            self._waiting[prefix].appendleft(item)
            self._waiting.move_to_end(prefix, last=False)
        else:
            self._waiting[prefix].append(item)

    def take(self, worker: int, most: int, *, idle: bool) -> list[T]:
        """Take up to `most` items of one group for a worker. None are taken if all waiting items belong to
        others and the worker is not `idle`."""
        prefix = self._choose(worker, idle)
        if prefix is None:
            return []
        group = self._waiting[prefix]
        found = [group.popleft() for _ in range(min(most, len(group)))]
        self._size -= len(found)
        self._last_system[worker] = prefix >> 32
        self._leave(prefix)
        self._owners.setdefault(prefix, set()).add(worker)
        self._owners.move_to_end(prefix)
        if group:
            self._enter(prefix)
        else:
            del self._waiting[prefix]
            self._forget_owners()
        return found

    def remove_worker(self, worker: int) -> None:
        """Forget what a dead worker has computed."""
        for prefix, owners in self._owners.items():
            if worker in owners and prefix in self._waiting:
                self._leave(prefix)
                owners.discard(worker)
                self._enter(prefix)
            owners.discard(worker)
        self._last_system.pop(worker, None)

    def _choose(self, worker: int, idle: bool) -> int | None:
        own = self._owned.get(worker)
        if own:
            return next(iter(own))
        if self._free:
            alike = self._free_by_system.get(self._last_system.get(worker, -1))
            return next(iter(alike or self._free))
        return next(iter(self._waiting), None) if idle else None

    def _enter(self, prefix: int) -> None:
        """List a group that waits under its owners, or as free."""
        owners = self._owners.get(prefix)
        if owners:
            for owner in owners:
                self._owned.setdefault(owner, OrderedDict())[prefix] = None
        else:
            self._free[prefix] = None
            self._free_by_system.setdefault(prefix >> 32, OrderedDict())[prefix] = None

    def _leave(self, prefix: int) -> None:
        for owner in self._owners.get(prefix, ()):
            if owned := self._owned.get(owner):
                owned.pop(prefix, None)
        if prefix in self._free:
            del self._free[prefix]
            alike = self._free_by_system[prefix >> 32]
            del alike[prefix]
            if not alike:
                del self._free_by_system[prefix >> 32]

    def _forget_owners(self) -> None:
        while len(self._owners) > REMEMBERED:
            prefix, owners = self._owners.popitem(last=False)
            if prefix in self._waiting:
                self._owners[prefix] = owners  # used again; those that wait are few
                return
