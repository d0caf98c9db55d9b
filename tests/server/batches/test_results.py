"""The files that a batch leaves: OpenAI's two, or the results of a message batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.messages import MessageBatchIndividualResponse

from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.server.batches.batch import Batch
from mlxrun.server.batches.results import UNANSWERED, publish_files
from mlxrun.server.batches.storage import Storage
from tests.helpers.batch_fakes import Bench, chat, write_job
from tests.helpers.batches_server import Clock


def make_storage(folder: Path) -> Storage:
    store = Storage(folder, 10**9, Clock())
    store.open()
    return store


def make_line(custom_id: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/messages", "body": body}


async def run_lines(store: Storage, batch: Batch, lines: list[dict[str, Any]], limit: int | None) -> None:
    """The folder of a batch whose job has run up to a line."""
    (store.root / "input").mkdir()
    store.batches.create(batch, write_job(store.root / "input", lines))
    if limit != 0:
        await Bench(store.batches.find_job(batch)).run(limit=limit)


@pytest.mark.parametrize("status", UNANSWERED)
async def test_every_request_has_a_result(tmp_path: Path, status: str) -> None:
    """Answered, refused, failed, not valid, not run; Anthropic's client reads each of them."""
    lines = [
        make_line("good", "hello"),
        make_line("field", "hello", nonsense=1),
        make_line("long", "LONG 1"),
        make_line("stream", "hello", stream=True),
        make_line("left", "hello"),
    ]
    store = make_storage(tmp_path)
    batch = Batch("msgbatch_01", "/v1/messages", "", "24h", 1, 2, is_message_batch=True)
    await run_lines(store, batch, lines, 4)
    publish_files(store, batch, status)
    assert batch.output_file_id == "file-01-results" and batch.error_file_id is None
    data = store.find_content(batch.output_file_id).read_bytes()
    found = {each["custom_id"]: each["result"] for each in map(json.loads, data.splitlines())}
    assert set(found) == {line["custom_id"] for line in lines} and len(data.splitlines()) == 5
    kinds = {name: result["type"] for name, result in found.items()}
    assert kinds == {
        "good": "succeeded",
        **dict.fromkeys(("field", "long", "stream"), "errored"),
        "left": UNANSWERED[status],
    }
    for line in data.splitlines():
        MessageBatchIndividualResponse.model_validate(json.loads(line))
    assert found["good"]["message"]["content"][0]["text"].startswith("hello")
    assert found["stream"]["error"]["error"]["type"] == "invalid_request_error"
    assert found["long"]["error"]["error"]["message"].startswith("prompt is too long")
    publish_files(store, batch, status)  # as after a kill
    assert store.find_content(batch.output_file_id).read_bytes() == data
    store.close()


async def test_a_message_batch_that_never_ran(tmp_path: Path) -> None:
    store = make_storage(tmp_path)
    batch = Batch("msgbatch_01", "/v1/messages", "", "24h", 1, 2, is_message_batch=True)
    await run_lines(store, batch, [make_line("a", "x"), make_line("b", "y")], 0)
    publish_files(store, batch, "cancelled")
    assert batch.output_file_id is not None
    lines = store.find_content(batch.output_file_id).read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"custom_id": "a", "result": {"type": "canceled"}},
        {"custom_id": "b", "result": {"type": "canceled"}},
    ]
    store.close()


@pytest.mark.parametrize("seconds", [None, 3600])
async def test_output_and_errors(tmp_path: Path, seconds: int | None) -> None:
    """As the job wrote them; they expire as the batch says, counted from their own creation."""
    store = make_storage(tmp_path)
    batch = Batch("batch_01", "/v1/chat/completions", "file-1", "24h", 1, 2, output_expires_after=seconds)
    await run_lines(store, batch, [chat("a", "x"), chat("b", "LONG 1")], None)
    paths = JobPaths(store.batches.find_job(batch))
    publish_files(store, batch, "completed")
    assert (batch.output_file_id, batch.error_file_id) == ("file-01-output", "file-01-error")
    for name, path in ((batch.output_file_id, paths.out), (batch.error_file_id, paths.errors)):
        file = store.find(name)
        assert file is not None and store.find_content(name).read_bytes() == path.read_bytes()
        assert file.expires_at == (None if seconds is None else store.get_time() + seconds)
        assert (file.purpose, file.owner) == ("batch_output", "")
    store.close()
