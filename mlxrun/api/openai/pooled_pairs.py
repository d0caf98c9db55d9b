"""Reads the pairs of texts of bodies that want scores: /v1/rerank and /v1/score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mlxrun.api.openai.pooled_texts import check_count
from mlxrun.core.field_errors import check_keys, get_required, reject, reject_type

PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))  # names of vLLM


class TextPair(NamedTuple):
    """A query and a document, whose relevance for it is scored, with their places in the body."""

    query: str
    document: str
    query_param: str
    param: str


def read_rerank_pairs(given: Mapping[str, Any]) -> list[TextPair]:
    """Return the query of a body with each of its documents. RequestError if one is missing or wrong."""
    check_given(given, "query", "documents")
    documents = _read_texts(given, "documents")
    return [TextPair(given["query"], text, "query", param) for param, text in documents.items()]


def read_text_pairs(given: Mapping[str, Any]) -> list[TextPair]:
    """Return the pairs of a body: one text with each of many, or as many with as many. RequestError if it has
    none, or wrong ones."""
    found = [names for names in PAIR_NAMES if not given.keys().isdisjoint(names)]
    if len(found) > 1:
        second = next(name for name in found[1] if name in given)
        reject(second, f"not together with {' and '.join(found[0])}")
    first, second = found[0] if found else PAIR_NAMES[0]
    check_given(given, first, second)
    left, right = list(_read_texts(given, first).items()), list(_read_texts(given, second).items())
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        reject(second, f"has {len(right)} texts, and {first} has {len(left)}: give as many, or one {first}")
    pairs = zip(left, right, strict=True)
    return [TextPair(query, text, query_param, param) for (query_param, query), (param, text) in pairs]


def check_given(given: Mapping[str, Any], *names: str) -> None:
    """Raise RequestError if one of these fields is missing."""
    for name in names:
        if name not in given:
            reject(name, "missing", code="missing_field")


def _read_texts(given: Mapping[str, Any], name: str) -> dict[str, str]:
    """The texts of a field by their places in it: a string, or an array of strings and of objects with only a
    `text`. RequestError for others."""
    value = given[name]
    if isinstance(value, str):
        return {name: value}
    if not isinstance(value, list):
        reject_type(name, value, "a string or an array")
    check_count(name, len(value))
    found = {}
    for at, item in enumerate(value):
        param = f"{name}[{at}]"
        if isinstance(item, dict):
            check_keys(item, ("text",), param)
            item = get_required(item, "text", str, param)
        elif not isinstance(item, str):
            reject_type(param, item, "a string or an object")
        found[param] = item
    return found
