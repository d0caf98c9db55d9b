"""Caches of other classes are saved through the class's own state and from_state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import HitKind
from mlxrun.core.step_plan import CacheHit
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec, StatePayload
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from tests.helpers import text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.snapshot_bench import LENGTH, PLACES, Bench, caller, same


class Other(ModelCaller):
    """A llama with caches of other classes."""

    def __init__(self, inner: ModelCaller, make: Callable[[], Any]) -> None:
        super().__init__(inner.model)
        self._make = make

    def make_cache(self) -> list[Any]:
        return [self._make() for _ in super().make_cache()]


def others() -> list[Any]:
    from mlx_lm.models import cache as lm
    from mlx_vlm.models import cache as vlm

    made: list[Any] = []
    for name, library in (("lm", lm), ("vlm", vlm)):
        made += [
            pytest.param(lambda c=library: c.RotatingKVCache(max_size=8, keep=2), id=f"{name} keep"),
            pytest.param(lambda c=library: c.ConcatenateKVCache(), id=f"{name} concatenate"),
            pytest.param(lambda c=library: c.ChunkedKVCache(64), id=f"{name} chunked"),
        ]
    return made


@pytest.mark.parametrize("make", others())
def test_other_classes_are_kept_whole(zoo: Zoo, make: Callable[[], Any]) -> None:
    """Through the class's own state and from_state; a class that forgets something is found out."""
    made = Other(caller(zoo, "llama"), make)
    snapshots = SnapshotCodec(run_trial_forward(made)[0])
    if snapshots.problem is not None:
        pytest.fail(str(snapshots.problem))
    bench = Bench(made)
    assert not bench.snapshots.has_deltas and bench.snapshots.has_states
    (ids,) = text_models.prompts(3, [LENGTH])
    for place in PLACES:
        cache, _ = bench.fill(ids[:place])
        hit = bench.save(layer_caches.view_row(cache), place)
        wanted = bench.answer(
            ids, cache, place
        )  # in the same chunks: the first tokens that are kept depend on them
        bench.answer(ids, bench.restore(hit), place, 1)
        assert same(bench.answer(ids, bench.restore(bench.through_bytes(hit)), place), wanted), place


def test_a_class_that_forgets_turns_the_cache_off(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    from mlx_lm.models.cache import ConcatenateKVCache

    class Forgetful(ConcatenateKVCache):
        def __init__(self) -> None:
            super().__init__()
            self.note = mx.array([1])

    snapshots = SnapshotCodec(run_trial_forward(Other(caller(zoo, "llama"), Forgetful))[0])
    assert snapshots.problem is not None and "Forgetful" in caplog.text
    assert not snapshots.is_usable(StatePayload(3, ()), 0)
    with pytest.raises(ValueError):
        snapshots.restore(CacheHit(3, HitKind.PREFIX), 8, [])
