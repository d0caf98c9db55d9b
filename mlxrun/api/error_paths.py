"""Maps errors about a translated chat body to the fields of the body that the client sent.

`sources` has a path of the chat body as key, and as value the path that it was translated from.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxrun.core.errors import RequestError


def find_source(param: str, sources: Mapping[str, str]) -> tuple[str, str]:
    """The source of the longest known path that `param` begins with, and the rest of `param`."""
    head = param
    while head:
        if head in sources:
            return sources[head], param[len(head) :]
        head = head[: max(head.rfind("."), head.rfind("["), 0)]
    return "", param


def rename_field(error: RequestError, param: str) -> None:
    """Changes the field that an error names, in its text too."""
    text = str(error)
    if error.param is not None and text.startswith(f"{error.param}:"):
        error.args = (param + text[len(error.param) :],)
    error.param = param
