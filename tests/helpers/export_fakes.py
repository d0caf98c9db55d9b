"""A finished run with lines of every kind, to be exported, and short cuts to open it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxrun.evals.exports.exported_run import ExportedRun, ExportNames
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import Bench, chat, write_job

LINES: list[Any] = [
    chat(
        "right", "say 7", {"expected": ["say 7", "seven"], "match": "contains", "group": "a"}, temperature=0.5
    ),
    chat("wrong", "hm", {"expected": "no", "group": "a"}, temperature=0.5, max_tokens=9),
    chat("many", "say 3", {"expected": "say 3", "match": "contains", "group": "a b"}, n=2, temperature=0.5),
    chat("letter", "B", {"expected": "B", "match": "choice", "options": ["one", "two"], "group": "a b"}),
    {"id": "short", "prompt": "once", "max_tokens": 3, "eval": {"expected": "onc", "group": "a"}},
    {"id": "item", "input": "hello", "eval": {"expected": "hello", "match": "contains", "group": "a"}},
    {
        "custom_id": "message",
        "method": "POST",
        "url": "/v1/messages",
        "body": {
            "model": "m",
            "system": "Be kind.",
            "messages": [{"role": "user", "content": "ho"}],
            "max_tokens": 20,
        },
        "eval": {"expected": "ho", "match": "contains", "group": "a"},
    },
    {
        "id": "pick",
        "prompt": ["ab cd", "ab xyz"],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 0,
        "eval": {"match": "likeliest", "expected": 1, "context_chars": 2, "group": "pick"},
    },
    chat("free", "hi"),
    chat("long", "LONG 1", {"expected": "x", "group": "a"}),
    "this is not JSON",
]
SCORED = ("right", "wrong", "many", "letter", "short", "item", "message", "pick", "long")


async def finish_rich_job(folder: Path, **names: Any) -> ExportedRun:
    """The run of LINES, of a model called acme/tiny."""
    bench = Bench(write_job(folder, LINES))
    await bench.run()
    return open_export(bench.job, **names)


def open_export(job: Path, **names: Any) -> ExportedRun:
    """An exported run. `names`: of ExportNames."""
    return ExportedRun.check(RunFolder.open(job), ExportNames(**{"model": "acme/tiny"} | names))
