"""What the scheduler asks of the prefix cache (cache/prefix_cache.py), and what stands in where there is none.

All calls come from the engine thread. A request is known from `open` to `close`; it is running from `find` to
`release`. Nothing here may raise because of what the cache holds: what cannot be used is a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mlxrun.scheduler.request import Request
from mlxrun.scheduler.step_plan import CacheHit, SnapshotRequest, SnapshotResult


class PrefixCacheInterface(Protocol):
    """The prefix cache, as the scheduler sees it."""

    @property
    def stops(self) -> bool:
        """Whether chunks should also end at a request's boundaries: the model has states to keep there."""
        ...

    @property
    def lasting(self) -> bool:
        """Whether what it keeps outlives the process: then a step takes one chunk of a prompt at most, so
        that little is lost."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it holds."""
        ...

    def open(self, request: Request) -> None:
        """A request waits from now on."""
        ...

    def held(self, request_id: str) -> bool:
        """Whether what this waiting request needs next is being computed by one that runs."""
        ...

    def find(self, request_id: str, output: Sequence[int], most: int) -> CacheHit | None:
        """A request begins to run, with this much of its answer: the longest usable hit, of at most `most`
        tokens. What a hit refers to is kept until `release`."""
        ...

    def due(self, request_id: str, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        """What to keep once tokens [start, stop) have been prefilled; prefill ends at `target`."""
        ...

    def release(self, request_id: str, output: Sequence[int], filled: int) -> list[SnapshotRequest]:
        """A row is dropped (it ended, or is preempted) with `filled` tokens in its cache: what to keep of it.
        `output`: the tokens after its prompt, its stop token included."""
        ...

    def close(self, request_id: str) -> None:
        """A request has ended."""
        ...

    def shrink(self, most: int) -> None:
        """Hold at most so many bytes of device memory: rows need it."""
        ...

    def put(self, saved: SnapshotResult) -> None:
        """A copy is ready."""
        ...

    def discard(self, request_id: str) -> None:
        """The hit of this running request could not be restored: forget what it was made of."""
        ...

    def clear(self) -> None:
        """Forget all that no running request uses, in memory and on disk."""
        ...

    def counts(self) -> Mapping[str, int]:
        """What it did since it started, by name; may be read from any thread."""
        ...

    def shutdown(self) -> None:
        """Finish what is under way; nothing is called after this."""
        ...


class NoPrefixCache:
    """No cache."""

    stops = False
    lasting = False
    nbytes = 0

    def open(self, request: Request) -> None:
        pass

    def held(self, request_id: str) -> bool:
        return False

    def find(self, request_id: str, output: Sequence[int], most: int) -> CacheHit | None:
        return None

    def due(self, request_id: str, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        return []

    def release(self, request_id: str, output: Sequence[int], filled: int) -> list[SnapshotRequest]:
        return []

    def close(self, request_id: str) -> None:
        pass

    def shrink(self, most: int) -> None:
        pass

    def put(self, saved: SnapshotResult) -> None:
        pass

    def discard(self, request_id: str) -> None:
        pass

    def clear(self) -> None:
        pass

    def counts(self) -> Mapping[str, int]:
        return {}

    def shutdown(self) -> None:
        pass
