"""The `eval` key of a job line: the expected answer, and how an answer is compared with it.

A list of expected strings or numbers holds alternatives, of which one must match; for `contains_all`, all of
them must. For `json` a list is an array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrun.core.field_errors import suggest
from mlxrun.jobs.scoring.answer_values import check_pattern, check_schema, check_tolerance, parse_number
from mlxrun.jobs.scoring.likeliest import NORMALIZATIONS, check_likeliest
from mlxrun.jobs.scoring.perplexity import PERPLEXITY, check_perplexity
from mlxrun.jobs.scoring.translation import TOKENIZERS, TRANSLATION, check_sacrebleu
from mlxrun.jobs.scoring.verdict import Scorer, UnloadedScorer, check_metric

_COMMON = ("expected", "match", "group", "cluster", "metrics", "scorer", "after")
_MOST_OPTIONS = 26
NEEDS_NO_EXPECTED = ("judge", PERPLEXITY)  # matches
OF_LOGPROBS = ("likeliest", PERPLEXITY)  # matches that compare no answer text


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """A validated `eval` object. `options`: those of the match; `cluster`: lines with the same one are not
    independent; `after`: only the text behind its last occurrence is scored; `scorer`: used in place of the
    match."""

    expected: Any
    match: str = "exact"
    group: str = "all"
    cluster: str | None = None
    metrics: tuple[str, ...] = ()
    after: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    scorer: Scorer | None = None

    @property
    def name(self) -> str:
        """The name of the way of scoring, in records."""
        return self.match if self.scorer is None else self.scorer.name

    @property
    def waits_for_judge(self) -> bool:
        """Whether a judge is to score the line later."""
        return self.match == "judge" and self.scorer is None

    def list_digest_parts(self) -> list[Any]:
        """List all values that decide an answer's result, as JSON."""
        scorer = None if self.scorer is None else [self.scorer.name, self.scorer.digest]
        return [
            *(self.expected, self.match, self.group, self.cluster, list(self.metrics), self.after),
            *(dict(self.options), scorer),
        ]


@dataclass(frozen=True, slots=True)
class EvalReader:
    """Reads the `eval` of lines. `scorers`: the loaded scorers that lines may name, by name. It is empty in a
    server, which runs no code of clients; None reads any name and loads nothing. `changes`: keys that replace
    those of every line; `scorer`: scores every line, with or without an `eval`. Lines with the match
    `likeliest` or `perplexity` keep it: they have no answer text for a scorer or another match."""

    scorers: Mapping[str, Scorer] | None = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    scorer: Scorer | None = None

    def read(self, value: Any) -> EvalSpec | None:
        """Read the `eval` of a line; None if it has none. ValueError with the reason if it cannot be read."""
        if value is None:
            return None if self.scorer is None else EvalSpec(None, scorer=self.scorer)
        if compares_likelihoods(value) and (self.scorer is not None or "match" in self.changes):
            return parse_eval(value, self.scorers)
        if self.changes and isinstance(value, dict):
            if "match" in self.changes:  # the options of the former one, and its scorer, go with it
                value = {key: each for key, each in value.items() if key in _COMMON and key != "scorer"}
            value = {**value, **self.changes}
        if self.scorer is not None and isinstance(value, dict):
            return replace(parse_eval(value, self.scorers, self.scorer), match="exact")
        return parse_eval(value, self.scorers)

    def describe(self) -> dict[str, Any]:
        """Describe the scorers, with the digests of their sources, and the changes, for the manifest. The
        result is empty if the job file and mlxrun alone decide scores."""
        scorers = {each.name: each.digest for each in (self.scorers or {}).values()}
        found: dict[str, Any] = {} if self.scorer is None else {"scorer": self.scorer.name}
        if self.scorer is not None:
            scorers[self.scorer.name] = self.scorer.digest
        if scorers:
            found["scorers"] = scorers
        return found | ({"changes": dict(self.changes)} if self.changes else {})


def compares_likelihoods(value: Any) -> bool:
    """Whether the `eval` of a line scores the logprobs of its prompts, not an answer."""
    return isinstance(value, dict) and value.get("match") in OF_LOGPROBS and value.get("scorer") is None


def parse_eval(value: Any, scorers: Mapping[str, Scorer] | None, scorer: Scorer | None = None) -> EvalSpec:
    """Parse an `eval`. ValueError with the reason if it is invalid. `scorers`: as in EvalReader; `scorer`:
    replaces the scorer that the `eval` names. With a scorer, `expected` may be of any type, or missing."""
    if not isinstance(value, dict):
        raise ValueError(f"eval must be an object, not {type(value).__name__}")
    match = value.get("match", "exact")
    if not isinstance(match, str) or match not in MATCHES:
        hint = suggest(match, MATCHES)
        raise ValueError(f"eval.match must be one of {', '.join(MATCHES)}, not {match!r}{hint}")
    if scorer is None and value.get("scorer") is not None:
        scorer = _find_scorer(value["scorer"], scorers)
    is_free = scorer is not None or match in NEEDS_NO_EXPECTED
    unknown = find_unknown_key(value, match, is_free)
    if unknown is not None:
        raise ValueError(f"eval.{unknown[0]} {unknown[1]}")
    if "expected" not in value and not is_free:
        raise ValueError("eval.expected is missing")
    for name in ("group", "cluster", "after"):
        if value.get(name) is not None and (not isinstance(value[name], str) or not value[name]):
            raise ValueError(f"eval.{name} must be a string that is not empty")
    if value.get("group", "all") is None:
        raise ValueError("eval.group must be a string that is not empty")
    parsed = EvalSpec(
        value.get("expected"),
        match,
        value.get("group", "all"),
        value.get("cluster"),
        _read_metrics(value.get("metrics")),
        value.get("after"),
        {key: each for key, each in value.items() if key not in _COMMON},
        scorer,
    )
    if not is_free:
        _MATCHES[match][0](parsed)
    return parsed


def _find_scorer(name: Any, scorers: Mapping[str, Scorer] | None) -> Scorer:
    if not isinstance(name, str):
        raise ValueError("eval.scorer must be a string such as module:function")
    if scorers is None:
        return UnloadedScorer(name)
    if name not in scorers:
        raise ValueError(f"eval.scorer {name!r} is not loaded; only jobs of a command have scorers")
    return scorers[name]


def find_unknown_key(keys: Iterable[str], match: str, is_free: bool) -> tuple[str, str] | None:
    """Find the first key that the `eval` of a line does not take, and say what is wrong with it. `is_free`: a
    scorer or a judge decides, so `expected` may be anything."""
    own = _MATCHES[match][1]
    unknown = next((key for key in keys if key not in _COMMON and key not in own), None)
    if unknown is None:
        return None
    of_others = [name for name, (_, keys) in _MATCHES.items() if unknown in keys]
    if of_others:
        return unknown, f"belongs to the match {', '.join(of_others)}, not to {match}"
    known = ", ".join(("expected, match and group", "cluster, metrics, after, scorer", *own))
    hint = suggest(unknown, (*_COMMON, *own))
    free = "; what else a scorer or a judge is to know belongs into expected" if is_free else ""
    return unknown, f"is not known{hint}; eval takes {known}{free}"


def _read_metrics(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise ValueError("eval.metrics must be a list of names")
    for name in names:
        try:
            check_metric(name)
        except ValueError as error:
            raise ValueError(f"eval.metrics: {error}") from error
    return tuple(dict.fromkeys(names))


def list_alternatives(expected: Any) -> list[Any]:
    """List the expected answers, of which one is enough."""
    return expected if isinstance(expected, list) else [expected]


def _check_values(spec: EvalSpec, kind: str, fits: Callable[[Any], bool]) -> None:
    values = list_alternatives(spec.expected)
    reason = f"or a list of {kind}s, because eval.match is {spec.match}"
    if not values:
        raise ValueError(f"eval.expected is an empty list; it must be a {kind}, {reason}")
    if not all(map(fits, values)):
        raise ValueError(f"eval.expected must be a {kind}, {reason}")


def _check_strings(spec: EvalSpec) -> None:
    _check_values(spec, "string", lambda value: isinstance(value, str))
    if "" in list_alternatives(spec.expected) and spec.match in ("contains", "contains_all"):
        raise ValueError(f"eval.expected is empty, which every answer fits, as eval.match is {spec.match}")
    if not isinstance(spec.options.get("ignore_case", False), bool):
        raise ValueError("eval.ignore_case must be true or false")


def _check_translation(spec: EvalSpec) -> None:
    _check_strings(spec)
    check_sacrebleu(spec.match)
    tokenize = spec.options.get("tokenize", TOKENIZERS[0])
    if tokenize not in TOKENIZERS:
        raise ValueError(
            f"eval.tokenize must be one of {', '.join(TOKENIZERS)}{suggest(tokenize, TOKENIZERS)}"
        )


def _check_regex(spec: EvalSpec) -> None:
    _check_strings(spec)
    pattern, capture = spec.options.get("pattern"), spec.options.get("capture")
    if pattern is None:
        for name in ("capture", "ignore_case"):
            if name in spec.options:
                raise ValueError(f"eval.{name} needs eval.pattern; eval.expected is then the captured text")
        if "" in list_alternatives(spec.expected):
            raise ValueError("eval.expected is empty, which every answer fits, as eval.match is regex")
        for each in list_alternatives(spec.expected):
            _check_field("expected", check_pattern, each)
        return
    if not isinstance(pattern, str) or not pattern:
        raise ValueError("eval.pattern must be a string that is not empty")
    compiled = _check_field("pattern", check_pattern, pattern)
    groups = [*range(compiled.groups + 1), *compiled.groupindex]
    if capture is not None and (isinstance(capture, bool) or capture not in groups):
        raise ValueError(f"eval.capture is {capture!r}, and eval.pattern has the groups {groups}")


def _check_field(name: str, check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"eval.{name} {error}") from error


def _check_number(spec: EvalSpec) -> None:
    _check_values(spec, "number", lambda value: parse_number(value) is not None)
    if "tolerance" in spec.options:
        _check_field("tolerance", check_tolerance, spec.options["tolerance"])


def _check_choice(spec: EvalSpec) -> None:
    options = spec.options.get("options")
    if options is not None:
        good = isinstance(options, list) and 2 <= len(options) <= _MOST_OPTIONS
        if not good or not all(isinstance(each, str) and each.strip() for each in options):
            raise ValueError(f"eval.options must be a list of 2 to {_MOST_OPTIONS} texts")

    def fits(value: Any) -> bool:
        return _check_field("expected", lambda each: find_option(each, options), value) is not None

    _check_values(spec, "letter", fits)


def find_option(value: Any, options: Sequence[str] | None) -> int | None:
    """Find the index of an expected option: given as its text, its letter, or its index from 0, also as a
    text. White space around it is ignored, and so are case, brackets and a point of a letter. None if there
    is no such option. ValueError if one option has this text, and another one this letter or index."""
    count = _MOST_OPTIONS if options is None else len(options)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < count else None
    if not isinstance(value, str):
        return None
    named, text = _find_text(value, options or ()), value.strip()
    letter = text.strip("().").upper()
    counted = int(text) if text.isdecimal() else ord(letter) - ord("A") if len(letter) == 1 else -1
    found = {each for each in (named, counted) if each is not None and 0 <= each < count}
    if len(found) > 1:
        both = "is the text of one option and the letter or index of another"
        raise ValueError(f"{value!r} {both}; give its index from 0 as a number")
    return found.pop() if found else None


def _find_text(value: str, options: Sequence[str]) -> int | None:
    """The index of the first option with this text, else of the first with it but for white space around."""
    texts = [each.strip() for each in options]
    if value in options:
        return options.index(value)
    return texts.index(value.strip()) if value.strip() in texts else None


def _check_likeliest(spec: EvalSpec) -> None:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    _check_values(spec, "number", is_count)
    starts = spec.options.get("context_chars")
    if not all(map(is_count, starts if isinstance(starts, list) else [starts])):
        raise ValueError("eval.context_chars must be a number of characters, or a list of them")
    normalize = spec.options.get("normalize", "none")
    if not isinstance(normalize, str) or normalize not in NORMALIZATIONS:
        hint = suggest(normalize, NORMALIZATIONS)
        raise ValueError(f"eval.normalize must be one of {', '.join(NORMALIZATIONS)}{hint}")


def check_line_eval(spec: EvalSpec, url: str, body: Mapping[str, Any]) -> None:
    """Raise ValueError if the body of a line does not fit its `eval`."""
    if url in ("/v1/embeddings", "/v1/rerank"):
        raise ValueError(f"eval: an answer of {url} is no text that can be compared")
    if spec.scorer is None and spec.match == "likeliest":
        check_likeliest(spec.expected, spec.options, url, body)
    if spec.scorer is None and spec.match == PERPLEXITY:
        check_perplexity(body)
    count = count_choices(body)
    if spec.metrics and spec.scorer is None and spec.match in (*TRANSLATION, PERPLEXITY):
        raise ValueError(f"eval.metrics are of scores from 0 to 1, and eval.match is {spec.match}")
    for name in spec.metrics:
        if check_metric(name) > count:
            raise ValueError(f"eval.metrics: {name} needs that many choices, and n is {count}")


def count_choices(body: Mapping[str, Any]) -> int:
    """Return the number of choices that a line's body requests."""
    count = body.get("n")
    return count if isinstance(count, int) and count > 0 else 1


# What checks the `eval` of each match, and the keys that it takes besides those of all.
_MATCHES: dict[str, tuple[Callable[[EvalSpec], None], tuple[str, ...]]] = {
    "exact": (_check_strings, ("ignore_case",)),
    "contains": (_check_strings, ("ignore_case",)),
    "contains_all": (_check_strings, ("ignore_case",)),
    "regex": (_check_regex, ("pattern", "capture", "ignore_case")),
    "json": (lambda _: None, ()),
    "number": (_check_number, ("tolerance",)),
    "json_schema": (lambda spec: _check_field("expected", check_schema, spec.expected), ()),
    "choice": (_check_choice, ("options",)),
    "f1": (_check_strings, ()),
    "bleu": (_check_translation, ("tokenize", "ignore_case")),
    "chrf": (_check_translation, ("ignore_case",)),
    "chrf++": (_check_translation, ("ignore_case",)),
    "ter": (_check_translation, ()),
    "likeliest": (_check_likeliest, ("context_chars", "normalize")),
    PERPLEXITY: (lambda _: None, ()),
    "judge": (lambda _: None, ()),  # which decides, so `expected` may be anything
}
MATCHES = tuple(_MATCHES)
