"""status.json: never older than a second while a job runs, and the last state once it has ended."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.run.progress import ProgressMeter
from mlxrun.jobs.run.status_file import WRITE_EVERY, StatusFile
from tests.helpers.batch_fakes import Bench, chats, write_job


def wait_for_updates(path: Path, count: int) -> None:
    """Block until the file was replaced so many times."""
    seen, end = set[str](), time.monotonic() + 60
    while len(seen) <= count:
        assert time.monotonic() < end, "the file gets old"
        seen.add(json.loads(path.read_text())["updated"])
        time.sleep(0.001)


def test_the_file_is_updated_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    """The test sleeps without giving way, as a loop that is blocked does."""
    assert WRITE_EVERY < 1
    path, meter = tmp_path / "status.json", ProgressMeter(time.monotonic, total=3, lines=3)
    with StatusFile(path, meter, run=4) as status:
        status.set_state("running")
        for number in (5, 11):
            meter.done = number
            wait_for_updates(path, 2)
            assert json.loads(path.read_text())["done"] == number
    found = json.loads(path.read_text())
    assert (found["state"], found["run"], found["done"]) == ("done", 4, 11)


async def test_the_file_is_fresh_while_a_model_is_loaded(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    start, seen = type(bench.client).start, []

    async def load(client: object) -> object:
        wait_for_updates(bench.paths.status, 2)
        seen.append(json.loads(bench.paths.status.read_text())["state"])
        return await start(client)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bench.client), "start", load)
        await bench.run()
    assert seen == ["loading"]
    assert json.loads(bench.paths.status.read_text())["state"] == "done"


def test_the_state_of_a_run_that_failed(tmp_path: Path) -> None:
    """What was said before it was raised, or else that it failed."""
    path, meter = tmp_path / "status.json", ProgressMeter(time.monotonic)
    for said, state in (("running", "failed"), ("interrupted", "interrupted")):
        with pytest.raises(JobError), StatusFile(path, meter) as status:
            status.set_state(said)
            raise JobError("x")
        assert json.loads(path.read_text())["state"] == state


def test_a_status_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once."""
    with StatusFile(tmp_path / "no" / "status.json", ProgressMeter(time.monotonic)) as status:
        status.set_state("running")
    assert not (tmp_path / "no").exists()
    assert len(caplog.records) == 1 and "status.json: cannot be written" in caplog.text
