"""The head's keys of rows that join, leave and reject, compared with a head that reads all pairs at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.tiny.random_models import write_text_model
from mlxrun.config.settings import ModelSettings
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.speculation import mtp_rows
from mlxrun.model.speculation.mtp_head import FoundHead, MTPHead, find_mtp_head, load_mtp_head
from mlxrun.model.speculation.mtp_rows import MTPRows
from tests.helpers import mtp_models

VOCAB, WIDTH, DEPTH = 50, 64, 3
Pair = tuple[mx.array, int]


class RowsWithReference:
    """Every call with random hidden states and tokens; `pairs`: what the head must have read of each row."""

    def __init__(self, head: MTPHead, compiled: bool = False) -> None:
        self.head = head
        keys = mx.random.split(mx.random.key(0))
        self.embedding = mx.random.normal((VOCAB, WIDTH), key=keys[0])
        self.output = mx.random.normal((WIDTH, VOCAB), key=keys[1])
        self.rows = MTPRows(
            head,
            lambda ids: self.embedding[ids],
            lambda hidden: hidden @ self.output,
            compiled=compiled,
            launch_first=compiled,
        )
        self.pairs: dict[str, list[Pair]] = {}
        self.decoding: set[str] = set()
        self.seed = 1

    def draw(self, count: int) -> tuple[mx.array, mx.array]:
        keys = mx.random.split(mx.random.key(self.seed))
        self.seed += 1
        hidden = mx.random.normal((count, WIDTH), key=keys[0])
        return hidden, mx.random.randint(0, VOCAB, (count,), key=keys[1])

    def prompt(self, rid: str, count: int) -> None:
        hidden, tokens = self.draw(count)
        self.rows.read_prompt(rid, hidden, tokens.tolist())
        self.pairs.setdefault(rid, []).extend(zip(hidden, tokens.tolist(), strict=True))

    def step(self, ids: str, counts: list[int] | None = None, kept: list[int] | None = None) -> None:
        counts = counts or [1] * len(ids)
        hidden, tokens = self.draw(sum(counts))
        self.rows.read_step(tuple(ids), hidden, tokens, counts, kept)
        start = 0
        for rid, count, size in zip(ids, counts, kept or counts, strict=True):
            new = zip(hidden[start : start + size], tokens[start : start + size].tolist(), strict=True)
            self.pairs.setdefault(rid, []).extend(new)
            start += count
        for rid in self.decoding - set(ids):
            del self.pairs[rid]
        self.decoding = set(ids)

    def expect(self, rid: str) -> tuple[int, ...]:
        """The draft that follows from all pairs of a row."""
        pairs, drafted = list(self.pairs[rid]), []
        for _ in range(DEPTH):
            hidden = mx.stack([pair[0] for pair in pairs])[None]
            embeds = self.embedding[mx.array([[pair[1] for pair in pairs]])]
            behind = mx.arange(len(pairs))[:, None] - mx.arange(len(pairs))
            mask = (behind >= 0) & (behind < (self.head.window or len(pairs)))
            normed, chained = self.head(embeds, hidden, mask, None)
            drafted.append(int(mx.argmax(normed[0, -1] @ self.output)))
            pairs.append((chained[0, -1], drafted[-1]))
        return tuple(drafted)

    def check(self) -> None:
        found = self.rows.draft(dict.fromkeys(self.decoding, DEPTH))
        assert found == {rid: self.expect(rid) for rid in self.decoding}


@pytest.fixture(scope="module", params=["glm4_moe", "exaone_moe", "deepseek_v3"])
def head(request: Any, tmp_path_factory: pytest.TempPathFactory) -> MTPHead:
    folder = tmp_path_factory.mktemp("head")
    write_text_model(request.param, folder)
    mtp_models.save_head(request.param, folder, mtp_models.draw_head(request.param, folder))
    info = load_model_info(ModelSettings(path=str(folder)))
    found = find_mtp_head(info)
    assert isinstance(found, FoundHead)
    return load_mtp_head(info, found, mx.float32)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_rows, "ROOM", 8)
    monkeypatch.setattr(mtp_rows, "WAITING", 4)


def run_steps(head: MTPHead, each: Callable[[RowsWithReference], None], compiled: bool = False) -> None:
    """Rows with prompts in chunks and without, that join late, leave, come back, and reject tokens."""
    rows = RowsWithReference(head, compiled)
    rows.prompt("a", 5)
    rows.prompt("a", 4)
    rows.prompt("b", 3)
    rows.step("a")
    each(rows)
    rows.step("ab", [3, 1], [2, 1])
    each(rows)
    rows.step("bcad", [1, 4, 4, 1], [1, 1, 4, 1])
    each(rows)
    for _ in range(6):
        rows.step("bcad")
    rows.step("bd", [2, 4], [1, 3])
    each(rows)
    rows.prompt("a", 11)
    rows.step("eabfghd")
    each(rows)
    rows.step("f", [4], [2])
    each(rows)


def test_drafts_follow_from_all_pairs_of_a_row(head: MTPHead) -> None:
    run_steps(head, RowsWithReference.check)


@pytest.mark.sweep
def test_drafts_of_compiled_heads_are_the_same(head: MTPHead) -> None:
    run_steps(head, RowsWithReference.check, compiled=True)


def test_long_rows_keep_the_newest_pairs(head: MTPHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row has too many, the head is as one that reads the newest ones; positions are relative."""
    monkeypatch.setattr(mtp_rows, "PLACES", 16)
    monkeypatch.setattr(mtp_rows, "KEPT", 6)
    rows = RowsWithReference(head)
    rows.prompt("a", 13)
    for _ in range(3):
        rows.step("ab")
    rows.pairs["a"] = rows.pairs["a"][-9:]  # six were kept when the three that waited were read
    rows.check()
    for _ in range(7):
        rows.step("ab")
        rows.rows.draft({"a": 1, "b": 1})
    rows.step("ab")
    rows.pairs["a"] = rows.pairs["a"][-7:]  # six were kept of 16
    rows.check()


def keep_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected tokens stay in the row's keys."""
    original = MTPRows.read_step
    monkeypatch.setattr(
        MTPRows, "read_step", lambda self, ids, h, t, counts, kept: original(self, ids, h, t, counts, counts)
    )


def keep_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a draft stay."""
    original = MTPRows.draft

    def draft(self: MTPRows, limits: dict[str, int]) -> dict[str, tuple[int, ...]]:
        drafted = original(self, limits)
        for rid in limits:
            self._lengths[self._slots[rid]] += DEPTH - 1
        return drafted

    monkeypatch.setattr(MTPRows, "draft", draft)


def forget_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MTPRows, "read_prompt", lambda *args: None)


@pytest.mark.parametrize("plant", [keep_rejected, keep_chained, forget_prompts])
def test_planted_bugs_are_found(
    head: MTPHead, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_steps(head, RowsWithReference.check)


def test_what_waits_is_read_when_a_draft_needs_it(head: MTPHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without drafts call the head once in a while only."""
    widths = []
    original = MTPRows.run_forward

    def forward(self: MTPRows, tokens: mx.array, *args: Any) -> Any:
        widths.append(tokens.shape[1])
        return original(self, tokens, *args)

    monkeypatch.setattr(MTPRows, "run_forward", forward)
    rows = RowsWithReference(head)
    for _ in range(11):
        rows.step("ab")
    assert widths == [4, 4]
    rows.check()
    assert widths == [4, 4, 4, 1, 1]


def test_buffers_shrink_when_rows_leave(head: MTPHead) -> None:
    rows = RowsWithReference(head)
    rows.step("abcdefghij")
    assert {array.shape[0] for array in rows.rows.list_arrays()} == {16}
    rows.step("bg")
    assert {array.shape[0] for array in rows.rows.list_arrays()} == {2}
    rows.check()
    rows.rows.keep_only(())
    assert not rows.rows.list_arrays() and not rows.rows.is_ready("b")
