"""Fields of other servers: their neutral values are accepted, all others are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.body_schema import describe_values
from mlxrun.api.openai.client_fields import (
    CHAT_IGNORED,
    COMPLETION_IGNORED,
    REFUSED_OF_OTHER_CHATS,
    REFUSED_OF_OTHERS,
)
from tests.helpers.field_examples import set_field
from tests.helpers.openai_api import CHAT, COMPLETION, HI, chat, complete, refused

OTHER: dict[str, Any] = {  # a value of another kind than those that are accepted
    "boolean": "yes",
    "string": 1,
    "integer": "1",
    "number": "1",
    "array": {"x": 1},
    "object": "x",
    "string or array": 1,
}
CASES = [
    *((CHAT, name, schema) for name, (schema, _) in CHAT_IGNORED.items()),
    *((COMPLETION, name, schema) for name, (schema, _) in COMPLETION_IGNORED.items()),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_other_values_are_refused(case: int) -> None:
    url, name, schema = CASES[case]
    values = describe_values(schema)
    if values == "any value":
        return
    base = {"messages": HI} if url == CHAT else {"prompt": "hi"}
    body = {**base, "stream": True, **set_field({}, name, OTHER.get(values, ["another", 9]))}
    assert refused(url, body, stream=True).param == name


@pytest.mark.parametrize("name", [*REFUSED_OF_OTHERS, *REFUSED_OF_OTHER_CHATS])
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    error = refused(CHAT, {"messages": HI, name: "x"})
    assert error.param == name and REFUSED_OF_OTHER_CHATS[name] in str(error)


def test_null_is_not_given() -> None:
    assert chat(**dict.fromkeys([*REFUSED_OF_OTHER_CHATS, "use_beam_search"])).requests
    assert complete(**dict.fromkeys(REFUSED_OF_OTHERS)).requests
