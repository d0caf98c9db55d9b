"""Checks lines without an engine, and loads the scorers that lines name.

`check_lines` prepares lines as a run does (templates, tokens, images), a few at a time, and reports problems
in the order of the file. `check_line_body` needs no model: it checks names and types of a body's fields.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mlxrun.api.anthropic.chat_messages import ChatMessagesBuilder
from mlxrun.api.anthropic.fields import check_body as check_message_body
from mlxrun.api.openai.fields import BODIES, URLS
from mlxrun.api.openai.pooled import check_pooling_body
from mlxrun.api.openai.transcription import check_transcription_line
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.fields import BODY as RESPONSE_BODY
from mlxrun.api.responses.input_items import read_input_items
from mlxrun.api.responses.tools import read_tools
from mlxrun.api.text.messages import normalize_messages
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.tools import read_offered_tools
from mlxrun.core.errors import JobError, RequestError
from mlxrun.core.field_errors import check_given
from mlxrun.jobs.agents.agent_settings import LineAgent, parse_agent
from mlxrun.jobs.agents.tool_session import ToolSession, run_tools
from mlxrun.jobs.lines.job_file import (
    COMPLETION,
    MESSAGE,
    POOLED,
    RESPONSE,
    TRANSCRIPTION,
    BadLine,
    JobLine,
    open_job,
    parse_line,
    read_lines,
)
from mlxrun.jobs.lines.line_index import LineIndex
from mlxrun.jobs.lines.line_keys import LineKeys, dump_canonical
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.line_bodies import TranscriptBody
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.custom_scorer import load_scorer
from mlxrun.jobs.scoring.eval_spec import OF_LOGPROBS, EvalReader, EvalSpec
from mlxrun.jobs.scoring.perplexity import PERPLEXITY
from mlxrun.jobs.scoring.verdict import Scorer, UnloadedScorer

_AT_ONCE = 16
_UNTEMPLATED = (COMPLETION, *POOLED, TRANSCRIPTION)
_MOST_NAMED = 20
_OF_CONVERSATION = ("state", "user", "max_turns", "seconds")  # keys of `agent` that change no tool
Report = Callable[[int, str], None]  # line number, reason


@dataclass(slots=True)
class CheckedLines:
    """Totals of the lines. In tokens, `longest`: the longest prompt; `largest`: the most of a prompt and its
    answer together."""

    lines: int = 0
    refused: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    largest: int = 0
    max_tokens: int = 0
    images: int = 0

    def add(self, prepared: PreparedRequest, turns: int = 1) -> None:
        """Count one valid line. `turns`: the most answers that it has, of which the first is prepared."""
        self.requests += len(prepared.requests)
        self.prompt_tokens += prepared.prompt_tokens
        self.longest = max(self.longest, *(len(request.prompt) for request in prepared.requests))
        self.largest = max(
            self.largest, *(len(request.prompt) + request.params.max_tokens for request in prepared.requests)
        )
        self.max_tokens += turns * sum(request.params.max_tokens for request in prepared.requests)
        self.images += sum(len(request.image_spans) for request in prepared.requests[:: prepared.n])


async def check_lines(index: LineIndex, preparer: LinePreparer, end: int, report: Report) -> CheckedLines:
    """Check the first `end` lines. `report` gets each problem with its line number. Tools that lines name are
    loaded, each set of them once."""
    total, tools = CheckedLines(lines=end), _LineTools(preparer.folder)
    for start in range(0, end, _AT_ONCE):
        positions = range(start, min(start + _AT_ONCE, end))
        loaded = [(await asyncio.to_thread(index.load, position)).line for position in positions]
        lines = [await tools.add(line) for line in loaded]
        results = await asyncio.gather(*(_check_line(line, preparer) for line in lines))
        for line, result in zip(lines, results, strict=True):
            if isinstance(result, str):
                total.refused += 1
                report(line.number, result)
            else:
                total.add(result, _count_turns(line))
    return total


class _LineTools:
    """The tools that lines name, as their requests offer them. `folder`: of the job; None on a server, which
    runs no code of clients."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._found: dict[bytes, list[dict[str, Any]] | RequestError] = {}

    async def add(self, line: JobLine | BadLine) -> JobLine | BadLine:
        """Return the line with its tools in the body, or a bad line if they cannot be used."""
        folder = self._folder
        if folder is None or isinstance(line, BadLine) or line.agent is None:
            return line
        agent = parse_agent(line.agent)
        if not agent.loop.has_tools or line.body.get("tools") is not None:
            return line
        named = {key: each for key, each in line.agent.items() if key not in _OF_CONVERSATION}
        key = dump_canonical(named)
        if key not in self._found:
            self._found[key] = await _describe_tools(agent, folder)
        found = self._found[key]
        if isinstance(found, RequestError):
            return BadLine(line.number, line.custom_id, str(found), "agent", line.eval)
        return replace(line, body={**line.body, "tools": found})


async def _describe_tools(agent: LineAgent, folder: Path) -> list[dict[str, Any]] | RequestError:
    def describe() -> list[dict[str, Any]]:
        with closing(ToolSession(agent, folder)) as session:
            return session.describe()

    try:
        return await run_tools(describe)
    except RequestError as error:
        return error


def _count_turns(line: JobLine | BadLine) -> int:
    if isinstance(line, BadLine) or line.agent is None:
        return 1
    return parse_agent(line.agent).loop.max_turns


async def _check_line(line: JobLine | BadLine, preparer: LinePreparer) -> PreparedRequest | str:
    """The requests of one line, or why it is refused."""
    if isinstance(line, BadLine):
        return line.reason
    try:
        body = await preparer.prepare(line)
        if isinstance(body, TranscriptBody):
            await body.held.aclose()
        return body.prepared
    except RequestError as error:
        return str(error)


def check_chats(index: LineIndex, model_info: ModelInfo, end: int) -> None:
    """Raise JobError if the first `end` lines need a chat template and the model has none. Bad lines are not
    counted. Without this check all lines would fail after the weights are loaded. This reads the file and
    blocks."""
    if model_info.chat_template is not None:
        return
    good = [position for position in range(end) if not index.get_row(position).bad]
    lines = (index.load(position).line for position in good)
    if good and all(isinstance(line, JobLine) and line.url not in _UNTEMPLATED for line in lines):
        raise JobError(
            f"{index.path}: nothing was run: its requests are chats, and the model {model_info.name!r} has "
            "no chat template; set model.chat_template, or give lines a prompt (/v1/completions)"
        )


def check_evals(index: LineIndex, end: int) -> None:
    """Raise JobError that names the lines which would be missing in the score. Their `eval` cannot be read,
    or they want a perplexity and have no windows. This reads the file and blocks."""
    bad = (index.load(position).line for position in range(end) if index.get_row(position).bad)
    wrong = (line for line in bad if isinstance(line, BadLine) and _is_missing_in_score(line))
    if shown := [f"{index.path}:{line.number}: {line.reason}" for line in islice(wrong, _MOST_NAMED + 1)]:
        more = ["there are more; --dry-run names all"] if len(shown) > _MOST_NAMED else []
        raise JobError.from_problems([*shown[:_MOST_NAMED], *more])


def _is_missing_in_score(line: BadLine) -> bool:
    """Whether a line with a wrong `eval` would not even score 0, as other failed lines do. A perplexity of 0
    would be the best one."""
    return line.param == "eval" and (line.eval is None or line.eval.name == PERPLEXITY)


async def check_job(path: Path, preparer: LinePreparer, limit: int | None, report: Report) -> CheckedLines:
    """Check the first `limit` lines of a job file (None: all). Nothing is written."""
    index = LineIndex(
        path, LineKeys("", path.parent, 0, max_video=0, max_audio=0), evals=EvalReader(scorers=None)
    )
    try:
        await asyncio.to_thread(index.scan)
        return await check_lines(index, preparer, min(limit or len(index), len(index)), report)
    finally:
        index.close()


def check_line_body(line: JobLine) -> None:
    """Raise RequestError if no model could answer the line."""
    if line.url == MESSAGE:
        given = check_message_body(line.body, False)
        ChatMessagesBuilder({}, complete=True).add_messages(given["messages"])
    elif line.url == RESPONSE:
        given = RESPONSE_BODY.check(line.body)
        read_tools(given)
        read_input_items(given.get("input", []), "check")
    elif line.url in POOLED:
        check_pooling_body(line.url, line.body)
    elif line.url == TRANSCRIPTION:
        check_transcription_line(line.body)
    else:
        given = BODIES[URLS[line.url]].check(line.body)
        required = "messages" if URLS[line.url] == "chat" else "prompt"
        check_given(given, required)
        if required == "messages":
            normalize_messages(given["messages"])
            read_offered_tools(given)


def make_eval_reader(
    job: Path, scorer: str | None = None, changes: Mapping[str, Any] | None = None
) -> EvalReader:
    """Make the reader that a command uses for the `eval` of a job's lines. `scorer`: a function, as
    module:function, that scores all lines; `changes`: keys that replace those of the lines. JobError if a
    scorer cannot be loaded."""
    own = None if scorer is None else load_scorer(scorer)
    return EvalReader(load_line_scorers(job), changes or {}, own)


def report_likelihood_lines(job: Path, name: str, say: Callable[[str], None]) -> bool:
    """Tell the user which lines compare likelihoods: no other match, scorer or judge can score them. Returns
    whether the job has other lines."""
    names, left, lines = _count_likelihood_lines(job)
    if left:
        count = pluralize(lines, "line") if left == lines else f"{left} of {pluralize(lines, 'line')}"
        what = f"`match: {' or '.join(sorted(names))}`"
        say(f"{name}: {count} with {what} left as they are: they have no answer text")
    return left < lines or not lines


def _count_likelihood_lines(job: Path) -> tuple[set[str], int, int]:
    """The matches of such lines, and the numbers of such lines and of all."""
    names, lines = Counter[str](), 0
    for _, wanted in _read_evals(job, b'"likeliest"', b'"perplexity"'):
        lines += 1
        if wanted is not None and wanted.name in OF_LOGPROBS:
            names[wanted.name] += 1
    return set(names), names.total(), lines


def load_line_scorers(job: Path) -> dict[str, Scorer]:
    """Load the scorers that lines name in `eval`, by name. This runs code that the job file names. JobError
    with the line if a scorer cannot be loaded."""
    found: dict[str, Scorer] = {}
    for number, wanted in _read_evals(job, b'"scorer"'):
        scorer = None if wanted is None else wanted.scorer
        if isinstance(scorer, UnloadedScorer) and scorer.name not in found:
            try:
                found[scorer.name] = load_scorer(scorer.name)
            except JobError as error:
                raise JobError(f"{job}:{number}: eval.scorer: {error}") from error
    return found


def _read_evals(job: Path, *marks: bytes) -> Iterator[tuple[int, EvalSpec | None]]:
    """The number of each line and its `eval`; None for lines without one of the marks, which are not
    parsed."""
    with open_job(job) as file:
        for raw in read_lines(file):
            is_marked = any(mark in raw.data for mark in marks)
            yield raw.number, parse_line(raw, evals=EvalReader(scorers=None)).eval if is_marked else None
