"""status.json: never older than a second while a job runs, and the last state once it has ended."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mlxrun.batch.progress import ProgressMeter
from mlxrun.batch.status_file import StatusFile
from mlxrun.errors import JobError
from tests.helpers.batch_fakes import Bench, chats, write_job


def read_age(path: Path) -> float:
    """Seconds since the file was updated, by its own account."""
    updated = datetime.fromisoformat(json.loads(path.read_text())["updated"])
    return (datetime.now(UTC) - updated).total_seconds()


def test_the_file_is_never_old_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    """The test sleeps without giving way, as a loop that is blocked does."""
    path, meter = tmp_path / "status.json", ProgressMeter(time.monotonic, total=3, lines=3)
    ages = []
    with StatusFile(path, meter, run=4) as status:
        status.set_state("running")
        for number in range(12):
            meter.done = number
            time.sleep(0.1)
            ages.append(read_age(path))
        assert json.loads(path.read_text())["done"] >= 6
        assert max(ages) < 1
    found = json.loads(path.read_text())
    assert (found["state"], found["run"], found["done"]) == ("done", 4, 11)


async def test_the_file_is_fresh_while_a_model_is_loaded(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    start, seen = type(bench.client).start, []

    async def load(client: object) -> object:
        for _ in range(8):
            await asyncio.sleep(0.2)
            seen.append(
                (json.loads(bench.paths.status.read_text())["state"], read_age(bench.paths.status) < 1)
            )
        return await start(client)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bench.client), "start", load)
        await bench.run()
    assert set(seen) == {("loading", True)}
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
