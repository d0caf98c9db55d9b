"""Scorers that users write: a function in a Python module or file, `module:function` or `file.py:function`.

    def score(answer, expected, line, response, transcript, state): ...

`answer` is the answer's text without reasoning. `expected` comes from the line's `eval`, None without one.
`line` is the job line as a dict; `response` is the response body without reasoning. `transcript` and `state`
are those of a conversation with tools, else None. A function may take fewer of these parameters, by name. It
returns a number from 0 to 1, a bool, or a dict. The dict has `score` and any of `comment`, `extracted` and
`scores` (further numbers by name). With any of `unit`, `better`, `aggregate` and `sums`, the score may be any
number (measure.py); with `sums` it may be left out.

The function is imported in this process to check it. It is called in a process of its own
(scorer_process.py), for one answer at a time.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.jobs.scoring.measure import MeasuredLines, ScoreMeasure
from mlxrun.jobs.scoring.scorer_process import ScorerLimits, ScorerPool
from mlxrun.jobs.scoring.scorer_sources import SourceLoader, compile_sources, digest_sources
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict

_PARAMETERS = ("answer", "expected", "line", "response", "transcript", "state")
_OPTIONAL = ("comment", "extracted", "scores")
_OF_MEASURE = ("unit", "better", "aggregate", "sums")


LIMITS = ScorerLimits(seconds=300.0, memory=8_000_000_000)  # of a function that may ask other programs


@dataclass(frozen=True, slots=True)
class ScorerPlace:
    """Where a function is imported from. `name`: module:function or file.py:function; `digest`: of its
    sources; `folder`: the working directory; `paths`: `sys.path`."""

    name: str
    digest: str
    folder: str
    paths: list[str]


class CustomScorer:
    """A function of a user. The first answer starts its process, which ends with this object."""

    def __init__(self, place: ScorerPlace, takes: tuple[str, ...]) -> None:
        self.name = place.name
        self.digest = place.digest
        self._place = place
        self._takes = takes
        self._lock = threading.Lock()
        self._pool = ScorerPool(LIMITS)

    def score(self, answer: ScoredAnswer) -> Verdict:
        """Call the function. What it raises or wrongly returns becomes a note. ScorerEnded if it takes too
        much time or memory, or ends its process."""
        values = {
            "answer": answer.text,
            "expected": answer.expected,
            "line": answer.line,
            "response": answer.body,
            **answer.talk,
        }
        arguments = {name: values.get(name) for name in self._takes}
        with self._lock:
            found = self._pool.call(f"{__name__}:call_function", asdict(self._place), arguments)
        return Verdict.read(found)


# The child.

_loaded: dict[str, Callable[..., Any]] = {}


def call_function(place: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the verdict of a user's function. This runs in the child."""
    return asdict(_call_function(ScorerPlace(**place), arguments))


def _call_function(place: ScorerPlace, arguments: Mapping[str, Any]) -> Verdict:
    try:
        function = _loaded.get(place.name) or _loaded.setdefault(place.name, _load_in_child(place))
    except JobError as error:
        return Verdict(0, note=str(error)[:500])
    try:
        found = function(**arguments)
    except MemoryError:
        raise  # this process cannot go on with what is left
    except (Exception, SystemExit) as error:
        return Verdict(0, note=f"the scorer {place.name} raised {type(error).__name__}: {error}"[:500])
    try:
        return _read_result(found)
    except Exception as error:
        return Verdict(0, note=f"the scorer {place.name} returned {error}"[:500])


def _load_in_child(place: ScorerPlace) -> Callable[..., Any]:
    os.chdir(place.folder)
    sys.path[:] = place.paths
    module, function = import_function(place.name)
    if digest_sources(module) != place.digest:
        raise JobError(f"the scorer {place.name} has changed since it was loaded")
    return function


# Both.


def _read_result(found: Any) -> Verdict:
    """The verdict that a function returned; ValueError if it returned none."""
    if not isinstance(found, Mapping):
        return Verdict(_read_share(found, ""))
    unknown = found.keys() - {"score", *_OPTIONAL, *_OF_MEASURE}
    if unknown or not found.keys() & {"score", "sums"}:
        keys = f"score (or sums), {', '.join((*_OPTIONAL, *_OF_MEASURE))}"
        raise ValueError(f"a dict with other keys than {keys}")
    scores = {str(key): _read_share(value, key) for key, value in (found.get("scores") or {}).items()}
    extracted, comment = found.get("extracted"), found.get("comment")
    try:
        json.dumps(extracted, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"an `extracted` that cannot be written as JSON: {error}") from error
    comment = None if comment is None else str(comment)
    if not found.keys() & set(_OF_MEASURE):
        return Verdict(_read_share(found["score"], "score"), extracted, None, scores, comment)
    sums = {str(key): _read_number(value, key) for key, value in (found.get("sums") or {}).items()}
    texts = {key: found[key] for key in ("unit", "better", "aggregate") if key in found}
    wrong = next((key for key, value in texts.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise ValueError(f"{texts[wrong]!r:.100} as `{wrong}`, where a text was expected")
    measure = ScoreMeasure(**texts)
    measure.check(sums)
    return Verdict(_read_measured(found, measure, sums), extracted, None, scores, comment, sums, measure)


def _read_measured(found: Mapping[str, Any], measure: ScoreMeasure, sums: Mapping[str, float]) -> float:
    """The score of an answer, or the figure of its sums alone."""
    if "score" in found:
        return _read_number(found["score"], "score")
    line = MeasuredLines(measure)
    line.add(0.0, sums)
    if line.value is None:
        raise ValueError(f"sums of which {measure.aggregate} is undefined, and no `score`")
    return line.value


def _read_share(value: Any, name: Any) -> float:
    number = _read_number(value, name, "a number from 0 to 1")
    if not 0 <= number <= 1:
        place = f" as `{name}`" if name else ""
        more = "" if name not in ("", "score") else "; other numbers need their `unit` (docs/evals.md)"
        raise ValueError(f"{value!r:.100}{place}, where a number from 0 to 1 was expected{more}")
    return number


def _read_number(value: Any, name: Any, wanted: str = "a number") -> float:
    try:
        number = float(value)  # NumPy's numbers too
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        place = f" as `{name}`" if name else ""
        raise ValueError(f"{value!r:.100}{place}, where {wanted} was expected")
    return number


def load_scorer(name: str) -> CustomScorer:
    """Import a scorer; modules in the working directory are found. JobError that names what is missing."""
    module, function = import_function(name)
    takes = _read_parameters(name, function)
    return CustomScorer(ScorerPlace(name, digest_sources(module), os.getcwd(), list(sys.path)), takes)


def import_function(name: str, kind: str = "scorer") -> tuple[ModuleType, Callable[..., Any]]:
    """Import a function and its module, by module:function or file.py:function. JobError that names what is
    missing. `kind`: what the function is, for messages."""
    place, colon, function_name = name.rpartition(":")
    if not colon or not place or not function_name.isidentifier():
        raise JobError(f"{kind} {name!r}: write module:function, or path/to/file.py:function")
    module = _import_module(f"{kind} {name!r}", place)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise JobError(f"{kind} {name!r}: {place} has no function {function_name!r}")
    return module, function


def _import_module(name: str, place: str) -> ModuleType:
    try:
        with compile_sources():
            if not place.endswith(".py"):
                if os.getcwd() not in sys.path:
                    sys.path.insert(0, os.getcwd())  # as `python -m` does; a console script does not
                return importlib.import_module(place)
            key = f"mlxrun_scorer_{hashlib.sha256(os.path.abspath(place).encode()).hexdigest()[:16]}"
            spec = importlib.util.spec_from_file_location(key, place, loader=SourceLoader(key, place))
            assert spec is not None and spec.loader is not None
            module = sys.modules[key] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
            spec.loader.exec_module(module)
            return module
    except FileNotFoundError as error:
        missing = Path(error.filename or place)
        what = "there is no such file" if missing == Path(place) else f"{missing}: {error.strerror}"
        raise JobError(f"{name}: cannot be imported: {what}") from error
    except (Exception, SystemExit) as error:
        raise JobError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error


def _read_parameters(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters that the function takes; JobError if it needs others."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise JobError(f"scorer {name!r}: its parameters cannot be read: {error}") from error
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in open_kinds]
    unknown = [each for each in needed if each not in _PARAMETERS]
    if unknown or any(each.kind is each.POSITIONAL_ONLY for each in parameters):
        reason = f"it has {', '.join(unknown) or 'positional-only ones'}"
        raise JobError(f"scorer {name!r}: its parameters must be of {', '.join(_PARAMETERS)}; {reason}")
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return _PARAMETERS
    return tuple(each.name for each in parameters if each.name in _PARAMETERS)
