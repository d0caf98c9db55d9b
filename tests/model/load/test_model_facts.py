"""Values of a model's files that are none are ignored, and the log says so (model/load/model_facts.py)."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.model.load.model_facts import collect_eos_ids, read_sampling_defaults

FOLDER, TOKENIZER = Path("a model"), SimpleNamespace(eos_token_id=2)


def list_ignored(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings, which all begin with the folder."""
    found = [record.getMessage() for record in caplog.records]
    assert all(message.startswith("a model: ") for message in found)
    return [message.removeprefix("a model: ") for message in found]


def test_sampling_values_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    """No numbers, or ones that no request may have: a penalty of 0 would make NaN of logits."""
    given = {"temperature": "hot", "top_p": 0.5, "top_k": True, "min_p": math.inf, "max_length": "x"}
    assert read_sampling_defaults(FOLDER, given | {"repetition_penalty": 0}) == {"top_p": 0.5}
    assert list_ignored(caplog) == [
        f"generation_config.json: {value} is ignored, since it is not a number from {wanted}"
        for value, wanted in (
            ("temperature 'hot'", "0 to 2"),
            ("top_k True", f"-1 to {1 << 31}"),
            ("min_p inf", "0 to 1"),
            ("repetition_penalty 0", "0.01 to 10"),
        )
    ]


def test_ends_that_are_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {"eos_token_id": [7, [8], None], "text_config": {"eos_token_id": 9.5}}
    assert collect_eos_ids(FOLDER, config, {"eos_token_id": "x"}, TOKENIZER) == {2, 7}
    assert list_ignored(caplog) == [
        f"{value} is ignored, since it is not the id of a token"
        for value in (
            "generation_config.json: eos_token_id 'x'",
            "config.json: eos_token_id [8]",
            "config.json: text_config: eos_token_id 9.5",
        )
    ]


def test_null_is_no_value(caplog: pytest.LogCaptureFixture) -> None:
    assert read_sampling_defaults(FOLDER, {"temperature": None, "top_k": 5}) == {"top_k": 5}
    assert collect_eos_ids(FOLDER, {}, {"eos_token_id": None}, TOKENIZER) == {2}
    assert list_ignored(caplog) == []
