"""Reads a suite file and validates it against its schema. Every problem has a file, a line and a column.

Problems are collected, so that one error reports all. An unknown key is read as the key that was probably
meant, or left out. A model or task with a value of the wrong type is left out of later checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jsonschema

from mlxrun.config.nodes import ConfigNode, ConfigProblem, Origin
from mlxrun.config.setting_fields import build_settings
from mlxrun.config.validation import describe_schema_error
from mlxrun.config.yaml_source import YamlError, parse_yaml, render_yaml
from mlxrun.core.errors import ConfigError
from mlxrun.core.field_errors import find_closest, suggest_word
from mlxrun.core.text_files import check_encoding, read_regular
from mlxrun.evals.suites.suite_schema import build_suite_schema
from mlxrun.evals.suites.suite_settings import Suite
from mlxrun.evals.tasks.task_box import fill_used_tasks
from mlxrun.jobs.lines.line_template import QUOTES_HINT, hint_at_quotes

Step = str | int
_SECTIONS = ("models", "tasks")  # whose values are wrong alone


@dataclass(slots=True)
class SuiteFile:
    """A suite with the positions of its values and the problems so far. `lines`: problems of other files, as
    whole sentences; `harmed`: tasks with problems, whose rows are not read."""

    path: Path
    suite: Suite
    sha256: str
    tree: ConfigNode
    problems: list[ConfigProblem] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    harmed: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        """The folder to which paths in the suite are relative."""
        return self.path.parent

    def locate(self, *steps: Step) -> str:
        """Return the position and the path of a value, as errors begin."""
        return ConfigProblem.at(self.tree.find_nearest(steps).origin, _join(steps), "").text.removesuffix(
            ": "
        )

    def report(self, steps: Sequence[Step], message: str, *, at_key: bool = False) -> None:
        """Add a problem of a value, or of its key."""
        node = self.tree.find_nearest(steps)
        origin = (node.key_origin if at_key else None) or node.origin
        self.problems.append(ConfigProblem.at(origin, _join(steps), message))

    def raise_problems(self) -> None:
        """Raise ConfigError with all problems if there are any, those of the suite first."""
        texts = [*(each.text for each in sorted(self.problems)), *self.lines]
        if texts:
            raise ConfigError.from_problems(texts)


def read_suite(path: Path, raw: bytes | None = None) -> SuiteFile:
    """Read the suite in a file. ConfigError if it is no readable mapping, or is a job. `suite` has the models
    and tasks without a problem. `raw`: what the file will have, if it is not yet written."""
    name = str(path)
    problems: list[ConfigProblem] = []
    if path.suffix == ".jsonl":
        raise ConfigError(f"{name}: this is a job, not a suite; run it with `mlxrun batch {name}`")
    try:
        raw = read_regular(path) if raw is None else raw
        check_encoding(raw[:4])
        tree = parse_yaml(raw.decode("utf-8-sig"), name, problems)
    except OSError as error:
        raise ConfigError(f"{name}: cannot read the suite: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: the suite is not UTF-8 text: {error.reason}") from error
    except YamlError as error:
        at = Origin("file", name, error.line, error.column)
        hint = QUOTES_HINT if raw and b"{{" in raw else ""
        raise ConfigError(f"{at}: {error}{hint}") from error
    problems = [replace(each, text=hint_at_quotes(each.text)) for each in problems]
    if problems and not tree.value:
        raise ConfigError.from_problems(each.text for each in problems)
    tree = fill_used_tasks(tree, problems)
    harmed: set[str] = set()
    while unknown := _find_errors(tree, unknown=True):  # a key that was mended may have some below it
        for found in unknown:
            steps, schema = list(found.absolute_path), cast(dict[str, Any], found.schema)
            problems += _mend_keys(tree, steps, list(schema["properties"]))
            if len(steps) > 1 and steps[0] == "tasks":
                harmed.add(str(steps[1]))
    wrong: set[tuple[Step, ...]] = set()
    for found in _find_errors(tree, unknown=False):
        problems += _explain(tree, found)
        depth = 2 if found.absolute_path and found.absolute_path[0] in _SECTIONS else 1
        wrong.add(tuple(found.absolute_path)[:depth])
    suite = build_settings(Suite, _leave_out(tree.strip_origins(), wrong))
    return SuiteFile(path, suite, hashlib.sha256(raw).hexdigest(), tree, problems, harmed=harmed)


def _find_errors(tree: ConfigNode, *, unknown: bool) -> list[jsonschema.ValidationError]:
    """Errors of the schema: those of keys that it does not know, or all others."""
    validator = jsonschema.Draft202012Validator(build_suite_schema())
    errors = validator.iter_errors(tree.strip_origins())
    return [each for each in errors if (each.validator == "additionalProperties") is unknown]


def _mend_keys(tree: ConfigNode, steps: Sequence[Step], known: Sequence[str]) -> Iterator[ConfigProblem]:
    """The problems of unknown keys in the mapping at a path. Each gets the name of the key that it is taken
    for, so that its value is checked too, or is removed where there is none."""
    node = tree.find(steps)
    assert node is not None
    for key in [each for each in node.value if each not in known]:
        meant, child = find_closest(key, known), node.value.pop(key)
        if meant is not None and meant not in node.value:
            node.value[meant] = child
        origin = child.key_origin or child.origin
        yield ConfigProblem.at(origin, _join((*steps, key)), f"unknown key{suggest_word(meant)}")


def _leave_out(plain: dict[str, Any], wrong: set[tuple[Step, ...]]) -> dict[str, Any]:
    """The suite without its wrong values; one without models or tasks is built too."""
    known = build_suite_schema()["properties"]
    found = {key: each for key, each in plain.items() if key in known and (key,) not in wrong}
    for name in _SECTIONS:
        section = found.get(name) or {}
        found[name] = {key: each for key, each in section.items() if (name, key) not in wrong}
    return found


def _explain(tree: ConfigNode, error: jsonschema.ValidationError) -> Iterator[ConfigProblem]:
    """The problems that one schema error means."""
    steps = list(error.absolute_path)
    node = tree.find(steps)
    assert node is not None
    if error.validator == "required":
        required: Any = error.validator_value
        for key in required:
            if key not in node.value:
                yield ConfigProblem.at(node.key_origin or node.origin, _join(steps), f"`{key}` is missing")
    else:
        is_model = len(steps) == 2 and steps[0] == "models" and isinstance(node.value, str)
        hint = f" (write {render_yaml({'set': {'model.path': node.value}})})" if is_model else ""
        yield ConfigProblem.at(node.origin, _join(steps), describe_schema_error(error, None) + hint)


def _join(steps: Sequence[Step]) -> str:
    return ".".join(map(str, steps))
