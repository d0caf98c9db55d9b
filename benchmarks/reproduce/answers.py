"""The answers of a run, and how many of their bytes differ from those of the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.core.errors import MlxrunError
from mlxrun.jobs.records.run_paths import JobPaths

Answers = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Differences:
    """Of `lines` answers, those that are not equal, and their bytes that differ. `note`: what shows that the
    condition was there, such as the share of reused tokens."""

    lines: int
    differing: int
    bytes: int
    note: str = ""


def read_answers(paths: JobPaths) -> Answers:
    """The output records of a run as they are written, by custom_id. MlxrunError if a line failed."""
    if paths.errors.exists() and paths.errors.stat().st_size:
        first = json.loads(paths.errors.read_bytes().splitlines()[0])
        raise MlxrunError(f"line {first['custom_id']} failed: {first['error']['message']}")
    return read_records(paths.out)


def read_records(path: Path) -> Answers:
    """The lines of an output by custom_id."""
    lines = path.read_bytes().splitlines(keepends=True)
    found = {json.loads(line)["custom_id"]: line for line in lines}
    if len(found) != len(lines):
        raise MlxrunError(f"{path}: a line was answered twice")
    return found


def strip_ids(answers: Answers) -> Answers:
    """What answers of a server's batch have in common with those of a command: not the ids and times, which
    are those of the batch, nor how many tokens were cached."""
    return {name: _dump_content(json.loads(line)) for name, line in answers.items()}


def _dump_content(record: Mapping[str, Any]) -> bytes:
    body = dict(record["response"]["body"])
    del body["id"], body["created"]
    body["usage"].pop("prompt_tokens_details", None)
    return json.dumps(body).encode()


def count_differences(oracle: Answers, answers: Answers, note: str = "") -> Differences:
    """Compare all lines. MlxrunError if a line is missing, or one is there that the oracle does not have."""
    if oracle.keys() != answers.keys():
        missing = sorted(oracle.keys() ^ answers.keys())
        raise MlxrunError(f"the lines differ: {len(missing)} are on one side only, such as {missing[0]}")
    differing = [name for name, line in oracle.items() if answers[name] != line]
    return Differences(
        len(oracle), len(differing), sum(_count_bytes(oracle[n], answers[n]) for n in differing), note
    )


def _count_bytes(old: bytes, new: bytes) -> int:
    return sum(a != b for a, b in zip(old, new, strict=False)) + abs(len(old) - len(new))
