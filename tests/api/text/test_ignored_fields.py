"""Fields without effect are logged once, and no client can fill the log with names."""

from __future__ import annotations

import logging

import pytest

from mlxrun.api.text import ignored_fields
from mlxrun.api.text.ignored_fields import ECHOED, MESSAGE_FIELDS, log_ignored, select_known
from mlxrun.core.errors import RequestError


@pytest.fixture(autouse=True)
def fresh(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(ignored_fields, "logged_fields", set())
    caplog.set_level(logging.INFO, logger="mlxrun.api.text.ignored_fields")


def test_once_for_each_field(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever message it is in."""
    for i in range(3):
        log_ignored(f"messages[{i}].tool_calls[{i}].index", "calls are in order")
    log_ignored("store", "nothing is stored")
    assert [record.getMessage() for record in caplog.records] == [
        "the field 'messages[].tool_calls[].index' is accepted and has no effect: calls are in order",
        "the field 'store' is accepted and has no effect: nothing is stored",
    ]


def test_names_of_clients_are_harmless(caplog: pytest.LogCaptureFixture) -> None:
    """They are escaped and shortened, and their number is limited."""
    log_ignored("messages[0].a\nERROR forged " + "x" * 5000, "y")
    (text,) = [record.getMessage() for record in caplog.records]
    assert "\n" not in text and len(text) < 300
    for i in range(3 * ignored_fields._MOST):
        log_ignored(f"messages[0].x{i}", "y")
    assert len(caplog.records) == ignored_fields._MOST + 1
    assert "further ones are not" in caplog.records[-1].getMessage()


def test_known_fields_stay(caplog: pytest.LogCaptureFixture) -> None:
    value = {"role": "user", "cache_control": {}, "own": 1, "empty": None}
    assert select_known(value, ("role",), "messages[7]", strict=False) == {"role": "user"}
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    assert logged[0].endswith(MESSAGE_FIELDS["messages[]"]["cache_control"]) and logged[1].endswith(ECHOED)
    with pytest.raises(RequestError, match=r"messages\[7\].cache_control: unknown field"):
        select_known(value, ("role",), "messages[7]", strict=True)
