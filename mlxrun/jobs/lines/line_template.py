"""The template of `mlxrun job make`: a job line with places that the columns of a row fill.

A template is a text, which becomes the user's message, or a job line in the short form as YAML or JSON. Jinja
is rendered in its strings. A string that is one expression, such as "{{ answer }}", becomes the value itself
and keeps its type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, meta
from jinja2.exceptions import TemplateError, UndefinedError

from mlxrun.api.text.templates.template_limits import LimitedEnvironment
from mlxrun.api.text.templates.work_budget import TemplateLimitError, apply_limits
from mlxrun.config.nodes import ConfigProblem
from mlxrun.config.yaml_source import YamlError, parse_yaml
from mlxrun.core.errors import JobError
from mlxrun.core.text_files import read_text_file
from mlxrun.jobs.lines.table_files import RowError

LINE_SUFFIXES = (".yaml", ".yml", ".json")
_EXPRESSION = re.compile(r"\{\{(?P<code>(?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)
_NULL = "null"
QUOTES_HINT = '; values with {{ }} need quotes: "{{ column }}"'
_TEXT_KEYS = ("content", "text", "prompt", "input", "system", "instructions")


class LineTemplate:
    """A compiled template. JobError if it has a mistake. `value`: a job line, or a part of one; `name`: the
    template's name in messages; `may_be_constant`: whether the template may use no column."""

    def __init__(self, value: Mapping[str, Any], name: str, *, may_be_constant: bool = False) -> None:
        self._name = name
        self._environment = LimitedEnvironment(undefined=StrictUndefined, finalize=_refuse_no_text)
        self._names: set[str] = set()  # of the variables in it
        self._value = self._compile(value, "")
        if not self.variables and not may_be_constant:
            raise JobError(
                f"{name}: the template uses no column; write {{{{ column }}}} for a column's value"
            )

    @property
    def variables(self) -> frozenset[str]:
        """The names of the columns that the template uses, `row` and `row_number` included."""
        return frozenset(self._names - self._environment.globals.keys())

    def render(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Render the line of a row. RowError if the row lacks a column, or if the template fails on it."""
        own = {"row": row, "row_number": number}
        for name in own.keys() & row.keys() & self._names:
            raise RowError(f"the column {name!r} has the name of a variable of templates; rename the column")
        try:
            with apply_limits(sum(len(each) for each in row.values() if isinstance(each, str))):
                line = _render(self._value, {**row, **own})
        except TemplateLimitError as error:
            raise RowError(f"the template cannot be filled in: {error}") from error
        except TemplateError as error:
            raise RowError(f"the template cannot be filled in: {error.message}") from error
        except Exception as error:  # a template may compute with any values
            raise RowError(f"the template fails: {type(error).__name__}: {error}") from error
        assert isinstance(line, dict)
        return line

    def _compile(self, value: Any, key: str) -> Any:
        """The value with each string that has Jinja in it replaced by a function of the columns. `key`: under
        which it stands."""
        if isinstance(value, Mapping):
            return {key: self._compile(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [self._compile(each, key) for each in value]
        if not isinstance(value, str) or not any(mark in value for mark in ("{{", "{%", "{#")):
            return value
        environment = self._environment
        try:
            names = meta.find_undeclared_variables(environment.parse(value))
            self._names |= names
            whole = _EXPRESSION.fullmatch(value.strip())
            if whole is None:
                return environment.from_string(value).render
            compute = environment.compile_expression(whole["code"], undefined_to_none=False)
            return partial(_compute_value, compute, is_text=key in _TEXT_KEYS)
        except TemplateSyntaxError as error:
            raise JobError(f"{self._name}: line {error.lineno} of the template: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Jinja's parser, or Python's
            raise JobError(f"{self._name}: the template is nested too deeply") from error


def _compute_value(compute: Callable[..., Any], columns: Mapping[str, Any], is_text: bool) -> Any:
    """The value of an expression; as text where an API takes text and the column has a number."""
    found = compute(columns)
    if isinstance(found, Undefined):
        str(found)  # raises its own error
    return str(_refuse_no_text(found)) if is_text and not isinstance(found, list | dict) else found


def check_cell(value: Any, name: str) -> Any:
    """Return the value. RowError if it makes no sensible text. `name`: the value's name in messages."""
    problem = _find_no_text(value)
    if isinstance(value, list | Mapping):
        problem = f"a {'list' if isinstance(value, list) else 'mapping'}, which is no single text"
    if problem is not None:
        raise RowError(f"{name}: a value is {problem}")
    return value


def _refuse_no_text(value: Any) -> Any:
    """The value; an error for one that becomes no sensible text."""
    problem = _find_no_text(value)
    if problem == _NULL:
        raise UndefinedError(f"a value is {_NULL}; write default('...', true) to use another")
    if problem is not None:
        raise UndefinedError(f"a value is {problem}")
    return value


def _find_no_text(value: Any) -> str | None:
    """What a value is that would become a text such as "None", "b'...'" or "nan"; else None."""
    if value is None:
        return _NULL
    if isinstance(value, bytes):
        return "bytes, which are no text"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no number of JSON"
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        found = (_find_no_text(item) for item in items if item is not None)
        return next((each for each in found if each is not None), None)
    return None


def read_template(path: Path) -> LineTemplate:
    """Read the template in a file: a job line if the file's suffix is one of LINE_SUFFIXES, else a message.
    JobError if it cannot be read."""
    text = read_named_text(path, "template")
    if path.suffix.lower() not in LINE_SUFFIXES:
        return make_message_template(text.removesuffix("\n"), str(path))
    problems: list[ConfigProblem] = []
    try:
        value = parse_yaml(text, str(path), problems).strip_origins()
    except YamlError as error:
        hint = QUOTES_HINT if "{{" in text else ""
        raise JobError(f"{path}:{error.line}:{error.column}: {error}{hint}") from error
    if not value:
        raise JobError(f"{path}: a template of this kind is a mapping with the fields of a job line")
    if problems:
        raise JobError.from_problems(hint_at_quotes(problem.text) for problem in problems)
    return LineTemplate(value, str(path))


def hint_at_quotes(problem: str) -> str:
    """Return the problem of a YAML file, with a hint if `{{ column }}` is the reason. Without quotes it is a
    mapping whose key is a mapping."""
    return problem + QUOTES_HINT if problem.endswith("not a list or a mapping") else problem


def read_named_text(path: Path, what: str) -> str:
    """Read a text that the user names, such as a template. JobError if it cannot be read."""
    try:
        return read_text_file(path)
    except OSError as error:
        raise JobError(f"{path}: cannot read the {what}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: the {what} is not UTF-8 text: {error.reason}") from error


def make_message_template(text: str, name: str) -> LineTemplate:
    """Make the template of a line with one message of the user."""
    return LineTemplate({"messages": [{"role": "user", "content": text}]}, name)


def _render(value: Any, columns: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _render(each, columns) for key, each in value.items()}
    if isinstance(value, list):
        return [_render(each, columns) for each in value]
    return value(columns) if callable(value) else value
