"""Ids of calls in Anthropic's form, and back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.anthropic.tool_use_ids import decode_tool_use_id, encode_call_id
from mlxrun.api.parsers.delta import make_call_id

_OWN_IDS = ("call_0123456789abcdef01234567", "461d44ad8", "functions.add:0", "call_1", "toolu_1", "ä_-", "")


@pytest.mark.parametrize("call_id", _OWN_IDS)
def test_an_id_comes_back_as_the_model_wrote_it(call_id: str) -> None:
    encoded = encode_call_id(call_id)
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]+", encoded)
    assert decode_tool_use_id(encoded) == call_id


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_id_comes_back(call_id: str) -> None:
    assert decode_tool_use_id(encode_call_id(call_id)) == call_id


@given(st.text())
def test_no_two_ids_become_one(tool_use_id: str) -> None:
    """Only what was encoded is decoded."""
    for given_id in (tool_use_id, f"toolu_own_{tool_use_id}"):
        decoded = decode_tool_use_id(given_id)
        assert decoded == given_id or encode_call_id(decoded) == given_id


def test_an_id_that_we_made_comes_back() -> None:
    made = make_call_id()
    assert encode_call_id(made) == made.replace("call_", "toolu_")
    assert decode_tool_use_id(encode_call_id(made)) == made


@pytest.mark.parametrize("foreign", ["toolu_01A09q90qw90lq917835lq9", "toolu_1", "toolu_own_A_zz", "x", ""])
def test_ids_of_other_servers_stay(foreign: str) -> None:
    assert decode_tool_use_id(foreign) == foreign
