"""Makes the job line of a task's row: its prompt or messages, examples before them, media and choices."""

from __future__ import annotations

import heapq
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import JobError
from mlxrun.evals.judge import Judge, parse_judge, read_judge
from mlxrun.evals.suites.suite_settings import FewShot, SuiteTask
from mlxrun.evals.suites.task_rows import RowSource, make_data_url, make_sound_url
from mlxrun.jobs.lines.line_keys import is_local_path
from mlxrun.jobs.lines.line_template import (
    LINE_SUFFIXES,
    LineTemplate,
    check_cell,
    read_named_text,
    read_template,
)
from mlxrun.jobs.lines.table_files import Row, RowError
from mlxrun.jobs.scoring.eval_spec import find_option
from mlxrun.jobs.scoring.perplexity import WINDOWS

Json = dict[str, Any]
Locate = Callable[[str], str]  # from a key of the task to its position in the suite
# Of each key with a column of media: their part of a message, what one is called, and what makes a URL of it.
_MEDIA = {
    "images": ("image_url", "image", make_data_url),
    "audio": ("audio_url", "sound", make_sound_url),
}


@dataclass(slots=True)
class TaskTemplate:
    """Renders rows of one task. `parts`: the templates, by their keys in the task; `examples`: rows of
    few-shot examples with their numbers, one more than are used."""

    task: SuiteTask
    parts: Mapping[str, LineTemplate]
    folder: Path | None  # of the data: paths of media are relative to it
    job_folder: Path | None = None  # of the job file, to which they become relative
    examples: Sequence[tuple[int, Row]] = field(default_factory=tuple)
    own_examples: bool = False  # whether the examples are rows of the task itself
    tools: Sequence[Json] = ()  # of `agent`, as requests offer them
    tool_folder: Path | None = None  # of their files
    tool_digests: Mapping[str, str] = field(default_factory=dict)  # of these files

    def render(self, row: Mapping[str, Any], number: int) -> Json:
        """Render the line of a row. RowError if the row lacks a column, or has a value that does not fit."""
        line = self._render_question(row, number)
        used = self._list_examples(row, number)
        if "messages" in line:
            self._add_messages(line, used)
        else:
            head = [self.parts["system"].render(row, number)["text"]] if "system" in self.parts else []
            line["prompt"] = "".join([*head, *map(self._render_example, used), line["prompt"]])
        if self.task.is_perplexity:
            line = {**line, WINDOWS: {}, "echo": True, "logprobs": 0, "max_tokens": 0}
        found = self.parts["eval"].render(row, number)["eval"] if "eval" in self.parts else {}
        if self.task.choices:
            line = self._make_choices(line["prompt"], row, number, found)
        if found:
            line["eval"] = {**line.get("eval", {}), **found}
        if "agent" in self.parts:
            self._add_agent(line, row, number)
        return line

    def _add_agent(self, line: Json, row: Mapping[str, Any], number: int) -> None:
        agent = self.parts["agent"].render(row, number)["agent"]
        if self.tool_folder is not None and self.job_folder is not None:
            agent["folder"] = os.path.relpath(self.tool_folder, self.job_folder)
        line["agent"] = agent | ({"digests": self.tool_digests} if self.tool_digests else {})
        if self.tools:
            line["tools"] = self.tools

    def _list_examples(self, row: Mapping[str, Any], number: int) -> list[tuple[int, Row]]:
        """The examples before the question of a row. RowError if those that fit are too few."""
        few_shot = self.task.few_shot
        if few_shot is None:
            return []
        found = [each for each in self.examples if not (self.own_examples and each[0] == number)]
        if few_shot.by is not None:
            if few_shot.by not in row:
                raise RowError(f"few_shot.by {few_shot.by}: there is no such column")
            found = [each for each in found if each[1].get(few_shot.by) == row[few_shot.by]]
            if len(found) < few_shot.count:
                raise RowError(f"few_shot.by {few_shot.by}: too few examples have the value of a row")
        return found[: few_shot.count]

    def _render_question(self, row: Mapping[str, Any], number: int) -> Json:
        key = next(name for name in ("prompt", "messages", "template") if name in self.parts)
        line = self.parts[key].render(row, number)
        messages = line.get("messages")
        if isinstance(messages, list):
            line["messages"] = list(messages)
            if self.task.media:
                self._add_media(line["messages"], row)
            if "system" in self.parts:
                line["messages"] = [*self.parts["system"].render(row, number)["messages"], *line["messages"]]
        return line

    def _render_answer(self, example: tuple[int, Row]) -> str:
        answer = self.parts["few_shot.answer"].render(example[1], example[0])["text"]
        return str(check_cell(answer, "few_shot.answer"))

    def _render_example(self, example: tuple[int, Row]) -> str:
        prompt = self._render_question(example[1], example[0])["prompt"]
        assert self.task.few_shot is not None
        answer = self._render_answer(example)
        return f"{prompt}{self.task.delimiter}{answer}{self.task.few_shot.separator}"

    def _add_messages(self, line: Json, used: Sequence[tuple[int, Row]]) -> None:
        """Put the messages of examples behind the system messages of a line."""
        at = _count_system(line["messages"])
        shown: list[Json] = []
        for example in used:
            messages = self._render_question(example[1], example[0])["messages"]
            shown += messages[_count_system(messages) :]
            shown.append({"role": "assistant", "content": self._render_answer(example)})
        line["messages"][at:at] = shown

    def _add_media(self, messages: list[Any], row: Mapping[str, Any]) -> None:
        """Put the images and sounds of a row before the text of its last message."""
        parts: list[Json] = []
        for key, name in self.task.media.items():
            if name not in row:
                raise RowError(f"{key} {name}: there is no such column")
            values = row[name] if isinstance(row[name], list) else [row[name]]
            part, _, make_url = _MEDIA[key]
            urls = [self._make_url(value, key, make_url) for value in values if value is not None]
            parts += [{"type": part, part: {"url": url}} for url in urls]
        last = messages[-1]
        content = last["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages[-1] = {**last, "content": [*parts, *texts]}

    def _make_url(self, value: Any, key: str, make_url: Callable[[bytes], str]) -> str:
        """The URL of a medium: of a path, a URL, the bytes of a file, or a mapping with one of them. `key`:
        of its column in the task; `make_url`: makes that of bytes."""
        column, what = self.task.media[key], _MEDIA[key][1]
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return make_url(value)
        if not isinstance(value, str) or not value:
            raise RowError(f"the column {column!r}: a value is no path, URL or {what}")
        if not is_local_path(value):
            return value
        path = Path(value) if self.folder is None else self.folder / value
        if not path.is_file():
            raise RowError(f"the column {column!r}: the {what} file does not exist")
        return value if self.job_folder is None else os.path.relpath(path, self.job_folder)

    def _make_choices(self, context: str, row: Mapping[str, Any], number: int, found: Json) -> Json:
        """A completion with a prompt for each choice, of which no token is generated. `found`: the `eval` of
        the row, from which `expected` is taken if it is there."""
        choices = self.parts["choices"].render(row, number)["choices"]
        if not isinstance(choices, list) or len(choices) < 2:
            raise RowError("choices: a list of at least two is needed")
        texts = [str(check_cell(each, "choices")) for each in choices]
        if "expected" not in found and str(self.task.expected) not in row:
            raise RowError(f"expected {self.task.expected}: there is no such column")
        value = found.pop("expected") if "expected" in found else row[str(self.task.expected)]
        several = isinstance(value, list)
        wanted: Json = {
            "match": "likeliest",
            "expected": [self._find_choice(each, texts) for each in value]
            if several
            else self._find_choice(value, texts),
            "context_chars": len(context),
        }
        if self.task.group is not None:
            if self.task.group not in row:
                raise RowError(f"group {self.task.group}: there is no such column")
            wanted["group"] = str(check_cell(row[self.task.group], "group"))
        prompts = [f"{context}{self.task.delimiter}{text}" for text in texts]
        return {
            "prompt": prompts,
            "echo": True,
            "logprobs": 1,
            "max_tokens": 0,
            "eval": wanted,
        }

    def _find_choice(self, value: Any, choices: Sequence[str]) -> int:
        """The position of the expected choice."""
        column = f"the column {self.task.expected!r}" if self.task.expected is not None else "eval.expected"
        try:
            found = find_option(value, choices)
        except ValueError as error:
            raise RowError(f"{column}: {error}") from error
        if found is None:
            raise RowError(f"{column}: a value is neither the text, the letter nor the index of a choice")
        return found


def _count_system(messages: Sequence[Any]) -> int:
    roles = [each.get("role") if isinstance(each, Mapping) else None for each in messages]
    return next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))


def compile_parts(
    task: SuiteTask, folder: Path, locate: Locate
) -> Iterator[tuple[str, LineTemplate | JobError]]:
    """Yield the keys of a task's templates, each with the template or its error. `folder`: the suite's
    folder."""
    is_completion = task.is_completion
    text_key = "prompt" if is_completion else "messages"

    def compile(key: str, value: Mapping[str, Any], constant: bool = False) -> LineTemplate | JobError:
        try:
            return LineTemplate(value, locate(key), may_be_constant=constant)
        except JobError as error:
            return error

    has_media = bool(task.media)  # then the question may be the same for each of them
    if task.prompt is not None:
        text: Any = task.prompt if is_completion else [{"role": "user", "content": task.prompt}]
        yield "prompt", compile("prompt", {text_key: text}, has_media)
    if task.messages:
        yield "messages", compile("messages", {"messages": list(task.messages)}, has_media)
    if task.template is not None:
        yield "template", _read_file(folder / expand_home(task.template), is_completion)
    if task.system is not None:
        message = {"role": "system", "content": task.system}
        system = {"text": task.system} if is_completion else {"messages": [message]}
        yield "system", compile("system", system, True)
    if task.choices:
        choices = task.choices if isinstance(task.choices, str) else list(task.choices)
        yield "choices", compile("choices", {"choices": choices}, True)
    if task.few_shot is not None:
        yield "few_shot.answer", compile("few_shot.answer", {"text": task.few_shot.answer})
    if task.agent is not None:
        yield "agent", compile("agent", {"agent": task.agent.dump()}, True)
    if wanted := build_eval(task):
        if isinstance(wanted.get("scorer"), str):
            wanted["scorer"] = locate_scorer(wanted["scorer"], folder)
        yield "eval", compile("eval", {"eval": wanted}, True)


def _read_file(path: Path, is_completion: bool) -> LineTemplate | JobError:
    try:
        if is_completion and path.suffix.lower() not in LINE_SUFFIXES:
            text = read_named_text(path, "template").removesuffix("\n")
            return LineTemplate({"prompt": text}, str(path))
        return read_template(path)
    except JobError as error:
        return error


LATER = "later"  # as the `judge` of a task


def parse_task_judge(
    task: SuiteTask, folder: Path, name: str, locate: Callable[[Sequence[str]], str] | None = None
) -> Judge | None:
    """Parse the judge of a task. None if there is none, or if `mlxrun score` will bring it. JobError if it is
    invalid. `folder`: the suite's folder; `name`, `locate`: for messages, as in `parse_judge`."""
    if task.judge in (None, LATER):
        return None
    if isinstance(task.judge, str):
        return read_judge(folder / expand_home(task.judge))
    return parse_judge(task.judge, name, locate)


def locate_scorer(name: str, folder: Path) -> str:
    """Return the name of a scorer with its path relative to the working directory, as job lines have it.
    `name`: as the suite in `folder` has it; the name of a module stays."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return name
    path = folder / expand_home(place)
    return f"{path if Path(place).is_absolute() else os.path.relpath(path)}:{function}"


def build_eval(task: SuiteTask) -> Json:
    """Build the template of a line's `eval` without the columns `expected` and `group`. A judged task may
    expect nothing; this template then gives its lines their group and match."""
    found = dict(task.eval)
    if isinstance(task.expected, dict):
        found |= {"expected": task.expected} | ({} if task.match is None else {"match": task.match})
    if task.judge is not None and (task.expected is None or task.match is None):
        found.setdefault("match", task.match or "judge")
    if task.expected is None and task.match is not None:
        found["match"] = task.match
    if task.expected_column is None and task.group is not None:
        found["group"] = f"{{{{ row[{json.dumps(task.group)}] | string }}}}"
    return found


def choose_examples(few_shot: FewShot, source: RowSource, *, own: bool = False) -> list[tuple[int, Row]]:
    """Choose rows for examples, with their numbers from 1: one more than are used, if there are enough, of
    each value of `by`. The seed and the rows alone decide. JobError if there are too few rows, or one cannot
    be read. `own`: the rows are those of the task, none of which is an example of itself."""
    rng, wanted = random.Random(few_shot.seed), few_shot.count + 1
    chosen: dict[str, list[tuple[float, int, Row]]] = {}
    for count, (number, row) in enumerate(source.read(), 1):
        if isinstance(row, RowError):
            raise JobError(f"{source.name}:{number}: {row}")
        group = chosen.setdefault(repr(row.get(few_shot.by)) if few_shot.by is not None else "", [])
        group.append((rng.random() if few_shot.order == "random" else 0, count, row))
        if len(group) > 2 * wanted:  # the table may be large
            group[:] = heapq.nsmallest(wanted, group, key=lambda each: each[:2])
    most = max(map(len, chosen.values()), default=0)
    if most < few_shot.count + own:
        why = ", and none is an example of itself" if own else ""
        raise JobError(f"few_shot.count is {few_shot.count}, but {source.name} has {most} rows{why}")
    for group in chosen.values():
        group[:] = heapq.nsmallest(wanted, group, key=lambda each: each[:2])
    return [(at, row) for group in chosen.values() for _, at, row in group]
