"""Which workers are refused, and which `--mixed` accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxrun.cluster.messages import WorkerRefused, check_worker
from tests.helpers.fake_workers import FACTS


@pytest.mark.parametrize(
    ("change", "reason", "mixed_helps"),
    [
        ({"versions": {"mlxrun": "2"}}, "mlxrun is 2, was 1", True),
        ({"device": {"name": "other"}}, "the device is other, was fake", True),
        ({"model": "n"}, "other files in the model's folder", False),
        ({"settings": "t"}, "workers.overrides", False),
        ({"protocol": 0}, "another version of mlxrun", False),
    ],
)
def test_what_differs(change: dict[str, Any], reason: str, mixed_helps: bool) -> None:
    facts = replace(FACTS, **change)
    with pytest.raises(WorkerRefused, match=reason) as refused:
        check_worker(facts, FACTS, mixed=False)
    assert refused.value.exit_code == 2
    if mixed_helps:
        assert check_worker(facts, FACTS, mixed=True) == [reason]
    else:
        with pytest.raises(WorkerRefused, match=reason):
            check_worker(facts, FACTS, mixed=True)


def test_alike() -> None:
    assert check_worker(replace(FACTS, host="there", process=2), FACTS, mixed=False) == []
