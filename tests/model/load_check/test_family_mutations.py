"""Bugs of each kind, planted in every family of the libraries, are found by the load check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.sweep.sweep import list_families
from benchmarks.tiny.random_models import read_vision_info, write_text_model, write_vision_model
from mlxrun.model.hooks import attention
from mlxrun.model.kv.ragged import recurrent_states, row_group
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check.choose import choose_methods
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.load_check.text_ladder import RefusedModelError
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller, run_trial_forward
from mlxrun.model.vision.embedder import Embedder
from mlxrun.model.vision.features import ImageFeatures
from tests.helpers.engine_driver import make_config
from tests.helpers.family_refusals import skip_expected_refusal
from tests.helpers.load_check_driver import list_failed
from tests.helpers.model_fixtures import mark_sweep

Patch = pytest.MonkeyPatch
Count = Callable[[bool], None]  # is told of each call whether the bug changed something
KEPT = [("text", "llama"), ("text", "qwen3_next"), ("vision", "qwen2_vl"), ("vision", "idefics3")]
ENDS_PROCESS = {"phi3small"}
# Their attention knows no positions, so that a wrong length changes nothing.
WITHOUT_POSITIONS = {"jamba", "kimi_k3", "kimi_linear", "nemotron_h", "nemotron_h_nano_omni"}
# Positions have axes, and the library gives images those of text.
IMAGES_AS_TEXT = {"minicpmo", "minicpmv4_6"}


def drop_masks(patch: Patch, count: Count) -> None:
    """Rows see the padding of their group."""
    original = row_group.RowGroup.make_mask

    def make_mask(self: Any, width: int, window: int | None) -> None:
        count(original(self, width, window) is not None)

    patch.setattr(row_group.RowGroup, "make_mask", make_mask)


def shorten_lengths(patch: Patch, count: Count) -> None:
    for stand_in in (attention.RaggedCache, attention.GroupCache):

        def begin(
            self: Any, groups: Any, offsets: mx.array, longest: int, own: Any = stand_in.begin_step
        ) -> None:
            count(True)
            own(self, groups, offsets - 1, longest)

        patch.setattr(stand_in, "begin_step", begin)


def keep_order_of_states(patch: Patch, count: Count) -> None:
    """A row goes on from the state of another that was in its place."""

    def reorder(parts: Sequence[mx.array | None], order: mx.array) -> mx.array | None:
        count(True)
        filled = [part for part in parts if part is not None]
        return mx.concatenate(filled, axis=0)[: order.size] if filled else None

    patch.setattr(recurrent_states, "reorder_state", reorder)


def restore_stale_rows(patch: Patch, count: Count) -> None:
    original = SnapshotCodec.restore

    def restore(*given: Any) -> list[Any]:
        cache = original(*given)
        for layer in flatten_caches(cache):
            count(True)
            if get_kind(layer) is LayerKind.STATE:
                layer.cache = [a if a is None else a + 1 for a in layer.cache]
            elif getattr(layer, "keys", None) is not None:
                layer.keys = mx.roll(layer.keys, 1, axis=2)
        return cache

    patch.setattr(SnapshotCodec, "restore", restore)


def mix_chunks(patch: Patch, count: Count) -> None:
    """A chunk after the first has its tokens in another order."""
    for kind in (ModelCaller, VisionModelCaller):

        def prefill(
            self: Any, ids: mx.array, cache: Any, start: int, *more: Any, own: Any = kind.prefill
        ) -> Any:
            count(start > 0)
            return own(self, mx.roll(ids, 1, axis=1) if start else ids, cache, start, *more)

        patch.setattr(kind, "prefill", prefill)


def drop_deltas(patch: Patch, count: Count) -> None:
    """What follows images has the positions that it would have behind text."""
    original = Embedder.read_positions

    def read_positions(*given: Any) -> tuple[mx.array | None, int]:
        positions, delta = original(*given)
        count(delta != 0)
        return positions, 0

    patch.setattr(Embedder, "read_positions", read_positions)


def swap_images(patch: Patch, count: Count) -> None:
    """The images of a prompt that is assembled of features change places."""

    def concatenate(parts: Sequence[ImageFeatures]) -> ImageFeatures:
        count(len(parts) > 1)
        arrays = zip(*(part.list_arrays() for part in reversed(parts)), strict=True)
        embeddings, *deepstack = (mx.concatenate(array) for array in arrays)
        return ImageFeatures(embeddings, tuple(deepstack))

    patch.setattr(ImageFeatures, "concatenate", staticmethod(concatenate))


IN_BATCHES = (drop_masks, shorten_lengths, keep_order_of_states)
OF_TEXT = (*IN_BATCHES, restore_stale_rows, mix_chunks)
OF_IMAGES = (drop_deltas, swap_images)


class Family:
    """A tiny model of a family, which is loaded anew for each load_check: the load check leaves what it found
    on it."""

    def __init__(self, kind: str, family: str, folder: Path) -> None:
        (write_text_model if kind == "text" else write_vision_model)(family, folder)
        self._config = resolve_config(make_config(folder))
        is_text = kind == "text"
        self._info: Any = (
            load_model_info(self._config.model, weights=True) if is_text else read_vision_info(family, folder)
        )
        self.has_axes = False  # of positions

    def load_check(self) -> LoadCheckReport:
        caller = load_caller(self._config, self._info)
        _, vocab = run_trial_forward(caller)
        self.has_axes = isinstance(caller, VisionModelCaller) and caller.embedder.mrope
        return choose_methods(caller, vocab, self._config, self._info)

    def find_failed(self) -> list[str]:
        """The checks that do not pass; the model may be refused for them."""
        try:
            return list_failed(self.load_check())
        except RefusedModelError as error:
            return [check.name for check in error.checks if not check.passed]


@pytest.mark.parametrize(("kind", "family"), mark_sweep(list_families(), KEPT))
def test_planted_bugs_are_found(tmp_path: Path, monkeypatch: Patch, kind: str, family: str) -> None:
    if family in ENDS_PROCESS:
        pytest.skip("a forward of this family ends the process")
    with skip_expected_refusal(kind, family):
        model = Family(kind, family, tmp_path / "model")
        sound = model.load_check()
    sees = kind == "vision" and not sound.refused["images"]
    changed, missed = set(), set()
    for plant in (*OF_TEXT, *(OF_IMAGES if sees else ())):
        calls: list[bool] = []
        with monkeypatch.context() as patch:
            plant(patch, calls.append)
            failed = model.find_failed()
        if any(calls):
            changed.add(plant)
            if failed == list_failed(sound):
                missed.add(plant)
    allowed = (
        set(IN_BATCHES) if sound.methods.decode == "row_by_row" else set()
    )  # what they break is not used
    if not sound.methods.snapshots:  # refused as they are
        allowed.add(restore_stale_rows)
    if sound.methods.whole_prompts:  # which have no chunks
        allowed.add(mix_chunks)
    if family in WITHOUT_POSITIONS or model.has_axes:  # axes: rows are given positions, not lengths
        allowed.add(shorten_lengths)
    assert missed <= allowed, [plant.__name__ for plant in missed - allowed]
    assert changed, "no bug changed anything"
    if sees and model.has_axes:
        assert (drop_deltas in changed) is (family not in IMAGES_AS_TEXT)
