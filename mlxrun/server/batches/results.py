"""Turns the files of a job into files of the server: OpenAI's output and error files, or Anthropic's results.

All functions block: call them on a worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from mlxrun.api.anthropic.response import build_errored, build_succeeded, build_unanswered
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.server.batches.batch import Batch
from mlxrun.server.batches.durable_files import convert_errors
from mlxrun.server.batches.storage import Storage, StoredFile

# How the requests without an answer ended, by the final status of their batch.
UNANSWERED = {"completed": "errored", "failed": "errored", "cancelled": "canceled", "expired": "expired"}


def publish_files(storage: Storage, batch: Batch, status: str) -> None:
    """Add the output and the errors, or the results of a message batch, to the server's files. `status`: the
    batch's final one."""
    paths = JobPaths(storage.batches.find_job(batch))
    if batch.is_message_batch:
        results = _write_results(paths, UNANSWERED[status])
        batch.output_file_id = _adopt(storage, batch, results, "results")
    else:
        batch.output_file_id = _adopt(storage, batch, paths.out, "output")
        batch.error_file_id = _adopt(storage, batch, paths.errors, "error")
    storage.batches.add_manifest(batch, paths.manifest)


def _adopt(storage: Storage, batch: Batch, path: Path, kind: str) -> str | None:
    """Make a file of the job one of the server, and return its id; None if there is none."""
    now, stem = storage.get_time(), batch.id.rpartition("_")[2]
    file = StoredFile(
        id=f"file-{stem}-{kind}",
        filename=f"{batch.id}_{kind}.jsonl",
        bytes=path.stat().st_size if path.exists() else 0,
        created_at=now,
        purpose="batch_output",
        owner=batch.owner,
        media_type="application/jsonl",
        expires_at=None if batch.output_expires_after is None else now + batch.output_expires_after,
    )
    return file.id if storage.adopt(path, file) else None


def _write_results(paths: JobPaths, ended: str) -> Path:
    """A file with the result of every line of a message batch: answers, errors, then what did not run."""
    results = paths.job.with_name("results.jsonl")
    with convert_errors(results), results.open("wb") as file:
        seen = set()
        for record in chain(_read_lines(paths.out), _read_lines(paths.errors)):
            seen.add(record["custom_id"])
            file.write(_dump(_convert(record)))
        for line in _read_lines(paths.job):
            if line["custom_id"] not in seen:
                file.write(_dump(build_unanswered(line["custom_id"], ended)))
    return results


def _convert(record: dict[str, Any]) -> dict[str, Any]:
    """The result of a record."""
    response, error = record["response"], record["error"]
    if error is None:
        return build_succeeded(record["custom_id"], response["body"])
    if response is not None:
        return build_errored(record["custom_id"], response["body"])
    refused = {"type": "invalid_request_error", "message": error["message"]}
    return build_errored(record["custom_id"], {"type": "error", "error": refused, "request_id": None})


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one by one; none if it does not exist."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                yield json.loads(line)


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
