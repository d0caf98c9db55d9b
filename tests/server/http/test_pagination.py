"""Pages of lists: every item once, in order, from either side; wrong parameters by name."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.core.errors import RequestError
from mlxrun.server.http.pagination import make_anthropic_page, make_page, read_query, sort_by_order


def render(item: int) -> dict[str, Any]:
    return {"id": f"i{item}"}


def test_the_parameters_of_a_url() -> None:
    query = read_query(make_mocked_request("GET", "/x?limit=3&after=a%20b"), ("after", "limit"))
    assert query == {"limit": "3", "after": "a b"}
    with pytest.raises(RequestError, match=r"limt: unknown parameter \(did you mean 'limit'\?\)"):
        read_query(make_mocked_request("GET", "/x?limt=3"), ("after", "limit"))


def test_order() -> None:
    assert sort_by_order([3, 2, 1], {}) == sort_by_order([3, 2, 1], {"order": "desc"}) == [3, 2, 1]
    assert sort_by_order([3, 2, 1], {"order": "asc"}) == [1, 2, 3]
    with pytest.raises(RequestError, match="'up' is neither"):
        sort_by_order([1], {"order": "up"})


@given(st.integers(0, 12), st.integers(1, 5))
def test_every_item_once(count: int, limit: int) -> None:
    """Page by page, as OpenAI's and Anthropic's clients go on; and backwards from the last one."""
    items = list(range(count))
    names = [f"i{item}" for item in items]
    for make, after in ((make_page, "after"), (make_anthropic_page, "after_id")):
        seen, query = list[str](), {"limit": str(limit)}
        while True:
            more = {"most": 100} if make is make_page else {}
            page = make(items, query, render, **more)  # type: ignore[operator]
            seen += [each["id"] for each in page["data"]]
            assert len(page["data"]) <= limit and (page["data"] or not page["has_more"])
            if not page["has_more"]:
                break
            query[after] = page["last_id"]
        assert seen == names
    if count:
        back, query = list[str](), {"limit": str(limit), "before_id": names[-1]}
        while True:
            page = make_anthropic_page(items, query, render)
            back = [each["id"] for each in page["data"]] + back
            if not page["has_more"]:
                break
            query["before_id"] = page["first_id"]
        assert back == names[:-1]


def test_the_shape_of_a_page() -> None:
    expected = {"data": [{"id": "i2"}], "first_id": "i2", "last_id": "i2", "has_more": True}
    assert make_anthropic_page([2, 1], {"limit": "1"}, render) == expected
    assert make_page([2, 1], {"limit": "1"}, render, most=9) == {"object": "list", **expected}
    empty = {"data": [], "first_id": None, "last_id": None, "has_more": False}
    assert make_anthropic_page([], {}, render) == empty


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1001"}, "limit"),
        ({"limit": "1.0"}, "limit"),
        ({"limit": "\u0661"}, "limit"),
        ({"after_id": "none"}, "after_id"),
        ({"before_id": "none"}, "before_id"),
        ({"before_id": "i1", "after_id": "i2"}, "before_id"),
    ],
)
def test_wrong_parameters(query: dict[str, str], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_anthropic_page([2, 1], query, render)
    assert caught.value.param == param
