"""Errors about fields of a request. Each text names the field and what was expected there.

Paths look like `messages[3].content[1].type`. They are `RequestError.param`, and the message starts with
them.

A translated chat body has errors about fields that the client did not send. `sources` maps a path of the chat
body to the path that it was translated from.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from mlxrun.core.errors import RequestError

UNSUPPORTED = "unsupported_parameter"
UNKNOWN = "unknown_parameter"


def reject(param: str, text: str, *, code: str | None = None) -> NoReturn:
    """Raises the RequestError for one field."""
    raise RequestError(f"{param}: {text}", param=param, code=code)


def reject_unsupported(param: str, reason: str) -> NoReturn:
    """Raises the RequestError for a known field that mlxrun cannot honour."""
    reject(param, f"not supported: {reason}", code=UNSUPPORTED)


def reject_choice(param: str, value: Any, options: Iterable[str]) -> NoReturn:
    """Raises the RequestError for a value that is not in `options`, with a suggestion."""
    names = list(options)
    hint = suggest(value, names) if isinstance(value, str) else ""
    reject(param, f"{quote(value)} is not one of {', '.join(names)}{hint}")


def reject_unknown(param: str, options: Iterable[str]) -> NoReturn:
    """Raises the RequestError for a field or parameter that is not in `options`, with a suggestion."""
    reject(shorten(param), f"unknown parameter{suggest(param, options)}", code=UNKNOWN)


def get_json_type(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def shorten(text: str, most: int = 160) -> str:
    """The text in at most `most` characters, so that an error about a large value stays readable."""
    return text if len(text) <= most else f"{text[: most - 12]}... ({len(text)})"


def describe_foreign_error(error: Exception, most: int) -> str:
    """The error of a library, for a client: at most `most` characters of its text. The text of a MemoryError
    is replaced, since it is about arrays."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for it"
    return shorten(str(error), most) or type(error).__name__


def quote(value: Any) -> str:
    """A short quoted form of a value. A value that is no string is named by its type, as it may be too deep
    for repr."""
    return repr(shorten(value)) if isinstance(value, str) else get_json_type(value)


def find_closest(word: Any, words: Iterable[str]) -> str | None:
    """The member of `words` that was probably meant; None if none is close."""
    given, words = str(word)[:80], list(words)
    for each in words:
        if each.casefold() == given.casefold():
            return each
    # With less, `num_retries` would be meant by `num_beams`.
    near = difflib.get_close_matches(given, words, 1, cutoff=0.7)
    return near[0] if near else None


def suggest_word(meant: str | None, quote: Callable[[str], str] = repr) -> str:
    """` (did you mean 'x'?)`, or "" without a word."""
    return f" (did you mean {quote(meant)}?)" if meant else ""


def suggest(word: Any, words: Iterable[str]) -> str:
    """A suggestion of the closest member of `words`, or "" if none is close."""
    return suggest_word(find_closest(word, words))


def reject_type(param: str, value: Any, expected: str) -> NoReturn:
    """Raises the RequestError for a value of the wrong JSON type. `expected`: the allowed types, in words."""
    reject(param, f"expected {expected}, got {get_json_type(value)}", code="invalid_type")


def check_type(value: Any, expected: type, param: str) -> Any:
    """Returns `value`. RequestError if it has another JSON type."""
    if type(value) is not expected:
        reject_type(param, value, get_json_type(expected()))
    return value


def check_given(given: Mapping[str, Any], *names: str) -> None:
    """RequestError if one of these fields is missing."""
    for name in names:
        if name not in given:
            reject(name, "missing", code="missing_field")


def get_required(value: dict[str, Any], key: str, expected: type, param: str) -> Any:
    """Returns a field of an object. RequestError if it is missing, null, or of another JSON type."""
    if value.get(key) is None:
        reject(f"{param}.{key}", "missing", code="missing_field")
    return check_type(value[key], expected, f"{param}.{key}")


def check_keys(value: Mapping[str, Any], allowed: Iterable[str], param: str) -> None:
    """RequestError for the first key that is not in `allowed`."""
    allowed = tuple(allowed)
    for key in value:
        if key not in allowed:
            hint = suggest(key, allowed)
            reject(f"{param}.{shorten(key)}", f"unknown field{hint}", code=UNKNOWN)


def iterate_strings(value: Any, param: str) -> Iterator[tuple[str, str]]:
    """Yields every string in a JSON value of any depth with its path, object keys included."""
    stack: list[tuple[str, Any]] = [(param, value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str):
            yield path, item
        elif isinstance(item, list):
            stack.extend((f"{path}[{i}]", part) for i, part in reversed(list(enumerate(item))))
        elif isinstance(item, dict):
            for key, part in reversed(list(item.items())):
                stack.append((f"{path}.{shorten(key, 60)}", part))
                stack.append((path, key))


def find_source(param: str, sources: Mapping[str, str]) -> tuple[str, str]:
    """The source of the longest known path that `param` begins with, and the rest of `param`. ("", param) if
    none is known."""
    head = param
    while head:
        if head in sources:
            return sources[head], param[len(head) :]
        head = head[: max(head.rfind("."), head.rfind("["), 0)]
    return "", param


@contextmanager
def rename_fields(find: Callable[[str], str]) -> Iterator[None]:
    """Makes errors of the block name the client's fields, and not those of a translated body. `find`: returns
    the client's path for a path of that body."""
    try:
        yield
    except RequestError as error:
        if error.param is not None:
            rename_field(error, find(error.param))
        raise


def rename_field(error: RequestError, param: str) -> None:
    """Changes the field that an error names, also in its text."""
    text = str(error)
    if error.param is not None and text.startswith(f"{error.param}:"):
        error.args = (param + text[len(error.param) :],)
    error.param = param
