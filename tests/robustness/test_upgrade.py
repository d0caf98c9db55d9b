"""A server that is stopped while it works, and started again, also by a newer version: everything is kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.kept_state import KEPT, check_state, write_state
from tests.helpers.model_fixtures import mark_sweep

pytestmark = pytest.mark.thorough


def test_a_stop_and_a_start_keep_everything(tmp_path: Path) -> None:
    """As a reboot does it: SIGTERM while a batch runs, and the same command again."""
    before, after = tmp_path / "before", tmp_path / "after"  # for their logs
    before.mkdir()
    known = write_state(before)
    shutil.copytree(before / "data", after / "data")
    check_state(after, known)


@pytest.mark.parametrize("version", sorted(path.name for path in KEPT.iterdir()))
def test_the_state_of_an_older_version_is_opened(tmp_path: Path, version: str) -> None:
    """Files, batches with their answers, stored responses and conversations."""
    shutil.copytree(KEPT / version / "data", tmp_path / "data")
    check_state(tmp_path, json.loads((KEPT / version / "known.json").read_text()))


@pytest.mark.parametrize(
    "lost", mark_sweep(["responses.sqlite", "batches/{unfinished}/job/*.out.jsonl"], ["responses.sqlite"])
)
def test_what_is_lost_is_seen(tmp_path: Path, lost: str) -> None:
    """The counterpart: a state without its stored responses, and one without the lines that were done."""
    version = sorted(KEPT.iterdir())[-1]
    known = json.loads((version / "known.json").read_text())
    shutil.copytree(version / "data", tmp_path / "data")
    (path,) = (tmp_path / "data").glob(lost.format(unfinished=known["unfinished"]))
    path.unlink()
    with pytest.raises((AssertionError, KeyError)):
        check_state(tmp_path, known)
