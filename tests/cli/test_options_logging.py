"""Log lines as text and as JSON (cli/options.py)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from mlxrun.cli.options import set_up_logging
from mlxrun.config.settings import LogSettings


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mlxrun")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


@pytest.mark.usefixtures("_logging_restored")
def test_json_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogSettings(level="warning", format="json"))
    log = logging.getLogger("mlxrun.test")
    log.info("not shown")
    log.warning("%d rows\nwait", 3)
    (line,) = capsys.readouterr().err.splitlines()
    row = json.loads(line)
    assert (row["level"], row["logger"], row["message"]) == ("warning", "mlxrun.test", "3 rows\nwait")


@pytest.mark.usefixtures("_logging_restored")
def test_text_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(LogSettings(level="debug"))
    logging.getLogger("mlxrun.test").debug("shown")
    logging.getLogger("somebody.else").info("not shown")
    assert capsys.readouterr().err.endswith(" DEBUG shown\n")
