"""Reasoning as a text that clients send back unread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.opaque_reasoning import decode_reasoning, encode_reasoning


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=50))
def test_any_text_comes_back(text: str) -> None:
    encoded = encode_reasoning(text)
    assert encoded.isascii() and decode_reasoning(encoded) == text


def test_it_cannot_be_read_at_a_glance() -> None:
    assert "čau" not in encode_reasoning("čau 🙂") and len(encode_reasoning("")) < 10


@pytest.mark.parametrize("foreign", ["", "ErUB", "mlxrun.!", "mlxrun.gICA", "mlxrun.č", "mlxrun.a"])
def test_a_text_of_another_server_is_none(foreign: str) -> None:
    assert decode_reasoning(foreign) is None
