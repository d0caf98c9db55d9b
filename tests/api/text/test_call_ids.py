"""Ids of calls for templates that accept only nine letters and digits."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.text.call_ids import fit_call_ids


def make_turn(*ids: str) -> list[dict[str, Any]]:
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": {}}} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "1"} for each in ids]
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]


def fit(*ids: str) -> list[str]:
    """The fitted ids of one turn. Calls and results have the same ones."""
    messages = make_turn(*ids)
    fit_call_ids(messages)
    calls = [call["id"] for call in messages[0]["tool_calls"]]
    assert calls == [message["tool_call_id"] for message in messages[1:]]
    return calls


def test_ids_that_fit_stay() -> None:
    assert fit("461d44ad8", "call00001") == ["461d44ad8", "call00001"]


def test_a_longer_id_becomes_its_end() -> None:
    """As templates of the newer form shorten it themselves."""
    assert fit("call_abcdefghijklmnopqrstuvwx", "toolu_461d44ad8") == ["pqrstuvwx", "461d44ad8"]


def test_calls_of_one_end_have_different_ids() -> None:
    first, second, third = fit("call_461d44ad8", "toolu_461d44ad8", "461d44ad8")
    assert first == "461d44ad8" and len({first, second, third}) == 3


def test_a_call_and_its_result_may_lack_an_id() -> None:
    messages = [{"role": "user", "content": "x"}, *make_turn("1")]
    del messages[1]["tool_calls"][0]["id"]
    fit_call_ids(messages)
    assert "id" not in messages[1]["tool_calls"][0] and len(messages[2]["tool_call_id"]) == 9


@given(st.lists(st.text(), unique=True, max_size=8), st.lists(st.text(), max_size=4))
def test_any_ids_get_different_ones(ids: list[str], later: list[str]) -> None:
    """Always the same ones, whatever follows."""
    fitted = fit(*ids)
    assert len(set(fitted)) == len(ids) and all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in fitted)
    assert fit(*ids, *later)[: len(ids)] == fitted
