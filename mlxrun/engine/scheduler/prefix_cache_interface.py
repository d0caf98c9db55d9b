"""The interface of the prefix cache for the scheduler and the engine. engine/prefix_cache/prefix_cache.py
implements it.

All methods are called on the engine thread, unless they say otherwise. A request is known from `track` to
`forget`, and has a row from `lookup` to `plan_final_snapshots`. An unusable entry is a cache miss and raises
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxrun.core.request import Request, TokenLogprob
from mlxrun.core.step_plan import CacheHit, PinnedPrefix, PromptLogprobs, SnapshotRequest, SnapshotResult


class PrefixCacheInterface:
    """The prefix cache as the scheduler sees it. The methods here are those of a cache without entries."""

    @property
    def stops_at_cache_positions(self) -> bool:
        """Whether chunks also end at a request's cache_positions, since the model has states to snapshot."""
        return False

    @property
    def survives_restart(self) -> bool:
        """Whether entries outlive the process. A step then computes at most one chunk of each prompt, so that
        a kill loses little."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the entries take."""
        return 0

    def track(self, request: Request) -> None:
        """Note a request that starts to wait."""

    def should_wait_for_prefix(self, request_id: str) -> bool:
        """Whether a running request computes the part of the prompt that this waiting request needs next."""
        return False

    def count_cached(self, request: Request) -> int:
        """How many tokens of a prompt a lookup would find now. The request need not be tracked."""
        return 0

    def lookup(self, request_id: str, output: Sequence[int], max_tokens: int) -> CacheHit | None:
        """The longest usable hit of at most `max_tokens` tokens, for a request that gets a row. `output`: its
        answer so far. The entries of the hit are pinned until `plan_final_snapshots`."""
        return None

    def find_prompt_logprobs(self, request_id: str, start: int) -> Sequence[TokenLogprob]:
        """The known logprobs of the prompt's tokens from `start` on, up to the first unknown one. Those of
        tokens inside images mean nothing. Called before `lookup`."""
        return ()

    def record_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take in logprobs that the runner has computed, before the snapshots of the same step."""

    def plan_snapshots(self, request_id: str, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        """The snapshots to take once tokens [start, stop) have been prefilled. Prefill ends at `target`."""
        return []

    def plan_final_snapshots(
        self, request_id: str, output: Sequence[int], kv_length: int
    ) -> list[SnapshotRequest]:
        """The snapshots to take of a row that is freed, because its request ended or is preempted. `output`:
        the tokens after the prompt, the stop token included; `kv_length`: tokens in the row's KV cache."""
        return []

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""

    def shrink(self, max_bytes: int) -> None:
        """Evict entries until they use at most this many bytes of device memory. Rows need the rest."""

    def store_snapshot(self, snapshot: SnapshotResult) -> None:
        """Take in a snapshot that the runner has copied."""

    def invalidate_hit(self, request_id: str) -> None:
        """Drop the entries of a running request's hit that could not be restored."""

    def clear(self) -> None:
        """Unpin all prefixes, and drop all entries, in memory and on disk, that no running request uses."""

    @property
    def pinned_prefixes(self) -> Sequence[PinnedPrefix]:
        """The prefixes that are pinned, the oldest first. May be called from any thread."""
        return ()

    def pin_prefix(self, request: Request, stop: int, name: str) -> PinnedPrefix | None:
        """Pin what the cache has of the first `stop` tokens of a prompt, so that eviction leaves it alone.
        None if it has nothing. RequestError if more would be pinned than `cache.pinned_share` allows."""
        return None

    def unpin_prefix(self, prefix_id: str) -> bool:
        """Make a pinned prefix an ordinary one. Returns whether there was one with this id."""
        return False

    def release_pinned_memory(self, max_bytes: int) -> None:
        """Shrink the cache to `max_bytes` by unpinning all prefixes, if it cannot be shrunk otherwise."""

    def read_counters(self) -> Mapping[str, int]:
        """The counters of the cache since the start, by name. May be called from any thread."""
        return {}

    def shutdown(self) -> None:
        """Finish pending work. No method is called after this one."""


class NoPrefixCache(PrefixCacheInterface):
    """A cache without entries, for `cache.backend: none`."""
