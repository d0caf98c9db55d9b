"""Compares the text of an answer with what is expected, by the match of its `eval`.

Strings are compared in Unicode's composed form (NFC). A letter with its accent is the same text to a reader
as one code point or as two. The model's tokenizer decides which it writes. Compatibility forms are not used,
as they change meaning: "2\N{SUPERSCRIPT TWO}" would become "22".
"""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mlxrun.jobs.scoring.answer_values import (
    MISSING,
    SEARCH_SECONDS,
    SearchTimer,
    find_json,
    find_last_number,
    find_schema_problem,
    is_close,
    is_equal,
    limit_depth,
)
from mlxrun.jobs.scoring.eval_spec import EvalSpec, find_option, list_alternatives
from mlxrun.jobs.scoring.letter_choice import find_letters, name_option
from mlxrun.jobs.scoring.measure import HIGHER, LOWER, ScoreMeasure
from mlxrun.jobs.scoring.translation import TRANSLATION, score_translation
from mlxrun.jobs.scoring.verdict import Verdict

_SCALARS = {"string", "number", "integer", "boolean", "null"}  # types of a JSON Schema


def match_answer(spec: EvalSpec, answer: str) -> Verdict:
    """Compare an answer. A pattern that takes too long scores 0, with a note. `extracted` is what was
    compared. For `exact` it is the answer without outer white space. For `contains` it is the first
    alternative found, for `contains_all` the list of all. For `regex` it is the matched or captured text.
    Else it is a JSON value, a number, or a letter (a list of letters if the choice is ambiguous)."""
    if spec.after is not None:
        answer = answer.rpartition(spec.after)[2] if spec.after in answer else ""
    try:
        return _MATCHES[spec.match](spec, answer)
    except TimeoutError:
        return Verdict(0, note=f"the pattern was searched for {SEARCH_SECONDS:g} s without a result")
    except ValueError as error:
        return Verdict(0, note=str(error))


def votes_by_score(spec: EvalSpec) -> bool:
    """Whether `extracted` does not tell wrong answers apart."""
    has_capture = spec.match == "regex" and "pattern" in spec.options
    return spec.scorer is not None or (spec.match not in _TELLING and not has_capture)


def normalize_extracted(spec: EvalSpec, extracted: Any) -> Any:
    """Return what was extracted from an answer in the form in which it is compared, so that equal answers
    vote together."""
    is_text = spec.match in ("exact", "regex") and isinstance(extracted, str)
    return _normalize(extracted, spec).strip() if is_text else extracted


def _normalize(text: str, spec: EvalSpec) -> str:
    text = unicodedata.normalize("NFC", text)
    # Case folding may decompose: Unicode 5.18, "caseless matching", normalizes again.
    return unicodedata.normalize("NFC", text.casefold()) if spec.options.get("ignore_case") else text


def _equals_one(text: str, spec: EvalSpec) -> bool:
    text = _normalize(text, spec).strip()
    return any(text == _normalize(each, spec).strip() for each in list_alternatives(spec.expected))


def _list_contained(spec: EvalSpec, answer: str) -> list[str]:
    text = _normalize(answer, spec)
    return [each for each in list_alternatives(spec.expected) if _normalize(each, spec) in text]


def _match_contains(spec: EvalSpec, answer: str) -> Verdict:
    found = _list_contained(spec, answer)
    return Verdict(bool(found), found[0] if found else None)


def _match_contains_all(spec: EvalSpec, answer: str) -> Verdict:
    found = _list_contained(spec, answer)
    return Verdict(len(found) == len(list_alternatives(spec.expected)), found)


def _match_regex(spec: EvalSpec, answer: str) -> Verdict:
    timer, pattern = SearchTimer(), spec.options.get("pattern")
    if pattern is None:
        for each in list_alternatives(spec.expected):
            if (match := timer.search(each, answer)) is not None:
                return Verdict(1, match.group())
        return Verdict(0)
    match = timer.search(pattern, answer)
    capture = spec.options.get("capture")
    if capture is None:
        capture = 1 if match is not None and match.re.groups else 0
    found = None if match is None else match[capture]
    return Verdict(0) if found is None else Verdict(_equals_one(found, spec), found)


def _match_json(spec: EvalSpec, answer: str) -> Verdict:
    found = find_json(answer, containers_only=isinstance(spec.expected, dict | list))
    return Verdict(found is not MISSING and is_equal(found, spec.expected), limit_depth(found))


def _match_json_schema(spec: EvalSpec, answer: str) -> Verdict:
    kinds = spec.expected.get("type") if isinstance(spec.expected, dict) else None
    may_be_scalar = bool(_SCALARS & set(kinds if isinstance(kinds, list) else [kinds]))
    found = find_json(answer, containers_only=not may_be_scalar)
    fits = found is not MISSING and find_schema_problem(spec.expected, found) is None
    return Verdict(fits, limit_depth(found))


def _match_number(spec: EvalSpec, answer: str) -> Verdict:
    found = find_last_number(answer)
    values: Sequence[Any] = list_alternatives(spec.expected)
    good = found is not None and is_close(found, values, spec.options.get("tolerance"))
    return Verdict(good, found)


def _match_choice(spec: EvalSpec, answer: str) -> Verdict:
    options = spec.options.get("options")
    right = {find_option(each, options) for each in list_alternatives(spec.expected)}
    letters = find_letters(unicodedata.normalize("NFC", answer), options or ())
    if len(letters) != 1:
        return Verdict(0, letters or None)
    return Verdict(letters[0] in {name_option(index) for index in right if index is not None}, letters[0])


def _match_f1(spec: EvalSpec, answer: str) -> Verdict:
    words = _list_words(answer)
    score = max(_compute_f1(words, _list_words(each)) for each in list_alternatives(spec.expected))
    return Verdict(score, answer.strip())


def _list_words(text: str) -> list[str]:
    """The words of a text as SQuAD's evaluation has them: without case, punctuation and articles."""
    text = "".join(
        each for each in unicodedata.normalize("NFC", text).lower() if each not in string.punctuation
    )
    return [word for word in text.split() if word not in ("a", "an", "the")]


def _compute_f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of words; of two texts without words it is 1."""
    if not words or not wanted:
        return float(words == wanted)
    return 2 * (Counter(words) & Counter(wanted)).total() / (len(words) + len(wanted))


def _match_translation(spec: EvalSpec, answer: str) -> Verdict:
    _, _, unit, is_lower = TRANSLATION[spec.match]
    score, sums = score_translation(spec.match, answer, list_alternatives(spec.expected), spec.options)
    measure = ScoreMeasure(unit, LOWER if is_lower else HIGHER, spec.match)
    return Verdict(score, answer.strip(), sums=sums, measure=measure)


_UNJUDGED = Verdict(0, note="no judge has scored this answer yet (mlxrun score RUN --judge FILE)")


_MATCHES: dict[str, Callable[[EvalSpec, str], Verdict]] = {
    "exact": lambda spec, answer: Verdict(_equals_one(answer, spec), answer.strip()),
    "contains": _match_contains,
    "contains_all": _match_contains_all,
    "regex": _match_regex,
    "json": _match_json,
    "json_schema": _match_json_schema,
    "number": _match_number,
    "choice": _match_choice,
    "f1": _match_f1,
    **dict.fromkeys(TRANSLATION, _match_translation),
    "judge": lambda spec, answer: _UNJUDGED,
}
_TELLING = ("exact", "number", "json", "choice")  # matches whose `extracted` tells wrong answers apart
