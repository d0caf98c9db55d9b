"""A draft source that fails is closed, and asked nothing any more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlxrun.core.draft_source import CheckedSource, KnownRow
from mlxrun.core.request import Request, SamplingParams
from tests.helpers.engine_fakes import make_request
from tests.helpers.fake_source import FakeSource


@pytest.mark.parametrize("call", ["takes", "advance", "is_ready", "propose", "forget"])
def test_an_error_of_any_method_switches_it_off(call: str) -> None:
    source = FakeSource(lambda tokens: 7)
    checked, row = CheckedSource(source), KnownRow(make_request("a"), (1, 2))
    checked.advance([row])
    assert checked.takes(row.request) and checked.is_ready(row)
    assert checked.propose([row], [2]) == [(7, 7)]
    source.fails = call
    answers = [checked.takes(row.request), checked.advance([row]), checked.is_ready(row)]
    answers += [checked.propose([row], [2]), checked.forget("a")]
    assert checked.problem == "it failed: RuntimeError: planted"
    calls = source.calls
    assert not (checked.takes(row.request) or checked.is_ready(row)) and checked.propose([row], [2]) == [()]
    assert source.calls == calls and source.closed
    source.closed = False
    checked.close()
    assert not source.closed, "closed twice"


def test_a_source_that_neither_drafts_nor_closes() -> None:
    class Broken(FakeSource):
        def close(self) -> None:
            raise RuntimeError("planted too")

    source = Broken(lambda tokens: 7)
    source.fails = "takes"
    checked = CheckedSource(source)
    assert not checked.takes(make_request("a")) and checked.problem == "it failed: RuntimeError: planted"
    checked.close()


def test_a_source_that_works_is_closed_once_its_engine_is() -> None:
    source = FakeSource(lambda tokens: 7)
    CheckedSource(source).close()
    assert source.closed


@pytest.mark.parametrize("drafts", [[(1, 2, 3)], [], [(1,), (2,)]])
def test_drafts_that_were_not_asked_for_switch_it_off(drafts: list[tuple[int, ...]]) -> None:
    class Wrong(FakeSource):
        def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> list[tuple[int, ...]]:
            return drafts

    checked = CheckedSource(Wrong(lambda tokens: 7))
    row = KnownRow(make_request("a"), ())
    assert checked.propose([row], [2]) == [()]
    assert checked.problem is not None and "ValueError" in checked.problem


def test_a_known_row_lists_its_tokens() -> None:
    row = KnownRow(Request("a", (1, 2, 3), SamplingParams()), [4, 5])
    assert row.num_tokens == 5
    assert [row.list_tokens(start) for start in range(6)] == [[1, 2, 3, 4, 5][start:] for start in range(6)]
    assert (
        row.list_tokens(1, 4) == [2, 3, 4]
        and row.list_tokens(3, 4) == [4]
        and row.list_tokens(0, 2) == [1, 2]
    )
