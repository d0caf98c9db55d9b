"""A judge: a model that scores the answers of a run in a second pass, by a prompt that is a template.

    prompt: |
      Question: {{ question }}
      Answer: {{ answer }}
      Is it as good as "{{ expected }}"? Reply with A (yes), B (partly) or C (no).
    generation: {max_tokens: 200, temperature: 0}
    verdict: {choices: {A: 1, B: 0.5, C: 0}}

Templates are those of `mlxrun job make`. Their variables are `question` (the user's last message), `answer`
(without reasoning), `expected`, `group`, `id`, `line` (the job line), and `row` with all of them. A
conversation with tools also has `transcript` and `state`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.config.nodes import ConfigProblem
from mlxrun.config.yaml_source import YamlError, parse_yaml
from mlxrun.core.errors import JobError, RequestError
from mlxrun.core.field_errors import suggest
from mlxrun.evals.judge_verdict import Problem, VerdictReader, build_reader, find_verdict_problems
from mlxrun.jobs.lines.job_check import check_line_body
from mlxrun.jobs.lines.job_file import BadLine, RawLine, parse_line
from mlxrun.jobs.lines.line_template import LineTemplate, read_named_text
from mlxrun.jobs.lines.table_files import RowError

_KEYS = ("prompt", "messages", "generation", "verdict")
_OF_AGENTS = ("transcript", "state")
_VARIABLES = frozenset(
    ("question", "answer", "expected", "group", "id", "line", "row", "row_number", *_OF_AGENTS)
)


@dataclass(frozen=True, slots=True)
class Judge:
    """A checked judge. `content`: the judge as it was written; `digest`: SHA-256 of the content."""

    name: str
    content: Mapping[str, Any]
    template: LineTemplate
    reader: VerdictReader
    digest: str

    def make_line(self, custom_id: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Make the job line that has one answer judged. JobError if the template fails, or if no model could
        answer the line."""
        try:
            line = {"id": custom_id, **self.template.render(columns, 0)}
            data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
            parsed = parse_line(RawLine(0, 0, data))
            if isinstance(parsed, BadLine):
                raise RowError(parsed.reason)
            check_line_body(parsed)
        except (RowError, RequestError, TypeError, ValueError) as error:
            raise JobError(f"{self.name}: the line {custom_id!r}: {error}") from error
        return line


def read_judge(path: Path) -> Judge:
    """Read the judge in a YAML or JSON file. JobError with all problems, each with file, line, column and
    key."""
    text = read_named_text(path, "judge")
    problems: list[ConfigProblem] = []
    try:
        tree = parse_yaml(text, str(path), problems)
    except YamlError as error:
        raise JobError(f"{path}:{error.line}:{error.column}: {error}") from error
    if problems:
        raise JobError.from_problems(problem.text for problem in problems)

    def locate(steps: Sequence[str]) -> str:
        node = tree.find_nearest(steps)
        return str(node.key_origin or node.origin)

    return parse_judge(tree.strip_origins(), str(path), locate)


def parse_judge(value: Any, name: str, locate: Callable[[Sequence[str]], str] | None = None) -> Judge:
    """Parse the judge that a mapping describes. JobError with all problems. Each names the key, and begins
    with `name`, or with the place that `locate` returns for its value."""
    problems = [
        f"{name if locate is None else locate(steps)}: {text}" for steps, text in _find_problems(value)
    ]
    if problems:
        raise JobError.from_problems(problems)
    prompt, generation = value.get("prompt"), value.get("generation") or {}
    reader = build_reader(value["verdict"])
    messages = value["messages"] if prompt is None else [{"role": "user", "content": prompt}]
    if reader.schema is not None and "response_format" not in generation:
        schema = {"name": "verdict", "schema": reader.schema}
        generation = {**generation, "response_format": {"type": "json_schema", "json_schema": schema}}
    template = LineTemplate({"messages": messages, **generation}, name)
    unknown = sorted(template.variables - _VARIABLES)
    if unknown:
        raise JobError(
            f"{name}: {unknown[0]!r} is not a variable of a judge: {', '.join(sorted(_VARIABLES))}"
        )
    if not template.variables & {"answer", "row", *_OF_AGENTS}:  # `row` has the answer too
        raise JobError(f"{name}: the template does not show the answer; write {{{{ answer }}}}")
    text = json.dumps(dict(value), sort_keys=True, ensure_ascii=False, default=str)
    return Judge(name, dict(value), template, reader, hashlib.sha256(text.encode()).hexdigest())


def _find_problems(value: Any) -> Iterator[Problem]:
    if not isinstance(value, Mapping):
        yield (), "a judge is a mapping with prompt or messages, generation and verdict"
        return
    for key in value:
        if key not in _KEYS:
            hint = suggest(key, _KEYS)
            yield (str(key),), f"{key} is not known{hint}; a judge takes {', '.join(_KEYS)}"
    if ("prompt" in value) == ("messages" in value):
        yield (), "a judge needs one of prompt and messages"
    if value.get("prompt") is not None and not isinstance(value["prompt"], str):
        yield ("prompt",), "prompt must be the text of the user's message"
    generation = value.get("generation") or {}
    if not isinstance(generation, dict):
        yield ("generation",), "generation must be an object with fields of the request"
    else:
        for key in sorted(generation.keys() & {"id", "url", "eval", "prompt", "messages", "input", "n"}):
            yield ("generation", key), f"generation.{key} cannot be given"
    yield from find_verdict_problems(value.get("verdict"))


def find_question(body: Mapping[str, Any]) -> str:
    """Find the text of the user's last message in a request's body, or its prompt. Empty if there is none."""
    items = next((body[name] for name in ("messages", "input", "prompt") if name in body), "")
    if isinstance(items, str):
        return items
    users = [each for each in items if isinstance(each, dict) and each.get("role") == "user"]
    if not users:
        return items[0] if items and isinstance(items[0], str) else ""
    content = users[-1].get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
