"""Looks at every line without an engine: what `--dry-run` counts and what `--strict` refuses.

Lines are prepared as for a run (templates, tokens, images), a few at a time, and reported in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlxrun.batch.job_file import CHAT, BadLine, JobLine
from mlxrun.batch.line_answerer import Prepare
from mlxrun.batch.line_index import Entry, Index
from mlxrun.batch.line_keys import LineKeys
from mlxrun.errors import JobError, RequestError
from mlxrun.text.model_info import ModelInfo

_AT_ONCE = 16
Report = Callable[[int, str], None]  # line number, reason


@dataclass(slots=True)
class CheckedLines:
    """What the lines add up to."""

    lines: int = 0
    refused: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    max_tokens: int = 0
    images: int = 0


async def check_lines(index: Index, prepare: Prepare, end: int, report: Report) -> CheckedLines:
    """Check the first `end` lines; each problem is reported with its line number."""
    total = CheckedLines()
    for start in range(0, end, _AT_ONCE):
        some = range(start, min(start + _AT_ONCE, end))
        entries = [await asyncio.to_thread(index.load, position) for position in some]
        found = await asyncio.gather(*(_check(entry, prepare) for entry in entries))
        for entry, outcome in zip(entries, found, strict=True):
            total.lines += 1
            if isinstance(outcome, str):
                total.refused += 1
                report(entry.line.number, outcome)
            else:
                _add(total, outcome)
    return total


def check_chats(index: Index, model_info: ModelInfo, end: int) -> None:
    """JobError if the first `end` lines are chats alone, or no requests, and the model has no template: all
    would fail, once its weights are loaded. Blocks, as the lines are read."""
    if model_info.chat_template is not None:
        return
    chats = 0
    for position in range(end):
        line = None if index.is_bad(position) else index.load(position).line
        if isinstance(line, JobLine):
            if line.url != CHAT:
                return
            chats += 1
    if chats:
        raise JobError(
            f"{index.path}: nothing was run: its requests are chats, and the model {model_info.name!r} has no chat "
            "template; set model.chat_template, or give lines a prompt (/v1/completions)"
        )


def say_problem(path: Path, say: Callable[[str], None], number: int, reason: str) -> None:
    """One problem in words."""
    say(f"{path}:{number}: {reason}")


async def _check(entry: Entry, prepare: Prepare) -> str | CheckedLines:
    """The numbers of one line, or why it is refused."""
    if isinstance(entry.line, BadLine):
        return entry.line.reason
    try:
        prepared = await prepare(entry.line)
    except RequestError as error:
        return str(error)
    return CheckedLines(
        requests=len(prepared.requests),
        prompt_tokens=prepared.prompt_tokens,
        longest=max(len(request.prompt) for request in prepared.requests),
        max_tokens=sum(request.params.max_tokens for request in prepared.requests),
        images=sum(len(request.image_spans) for request in prepared.requests[:: prepared.n]),
    )


def _add(total: CheckedLines, one: CheckedLines) -> None:
    total.requests += one.requests
    total.prompt_tokens += one.prompt_tokens
    total.longest = max(total.longest, one.longest)
    total.max_tokens += one.max_tokens
    total.images += one.images


async def check_job(
    path: Path, prepare: Prepare, limit: int | None, say: Callable[[str], None]
) -> CheckedLines:
    """Check a job file by itself; nothing is written. Each problem is said as `file:line: reason`."""
    index = Index(path, LineKeys("", path.parent, 0))
    try:
        await asyncio.to_thread(index.scan)
        report = partial(say_problem, path, say)
        return await check_lines(index, prepare, min(limit or len(index), len(index)), report)
    finally:
        index.close()
