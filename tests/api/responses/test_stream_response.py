"""The response object has the values that were used."""

from __future__ import annotations

from tests.helpers.responses_api import ADD, make_deltas, write_events


def test_the_response_has_what_was_used() -> None:
    _, response = write_events(
        make_deltas(("content", "a")), temperature=0.5, metadata={"a": "b"}, tools=[ADD], seed=7, user="u"
    )
    wanted = {"temperature": 0.5, "top_p": 1.0, "metadata": {"a": "b"}, "user": "u", "mlxrun": {"seed": 7}}
    assert response.items() >= wanted.items()
    assert response["tools"] == [{"strict": False, **ADD}]
    _, response = write_events([], tools=[{"type": "function", "name": "f"}])
    assert response["tools"][0] == {
        "type": "function", "name": "f", "description": None, "parameters": None, "strict": False,
    }  # fmt: skip
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 2
    assert response["reasoning"] == {"effort": None, "summary": None}
