"""OpenAI's and Anthropic's lists: the parameters of their URLs, and their pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web

from mlxrun.core.field_errors import quote, reject, reject_unknown

Item = TypeVar("Item")


def read_query(request: web.Request, allowed: Sequence[str]) -> dict[str, str]:
    """Return the parameters of the URL. RequestError for one that is not `allowed`."""
    for name in request.query:
        if name not in allowed:
            reject_unknown(name, allowed)
    return dict(request.query)


def sort_by_order(newest_first: Sequence[Item], query: Mapping[str, str]) -> list[Item]:
    """Return the items in the `order` of the query; newest first if it has none."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        reject("order", f"{quote(order)} is neither 'asc' nor 'desc'")
    return list(newest_first) if order == "desc" else list(reversed(newest_first))


def make_page(
    items: Sequence[Item],
    query: Mapping[str, str],
    render: Callable[[Item], dict[str, Any]],
    *,
    default: int = 20,
    most: int = 100,
) -> dict[str, Any]:
    """Build OpenAI's list object: `limit` items behind the one whose id is `after`. RequestError if one of
    these parameters is wrong."""
    limit = _read_limit(query, default, most)
    found = [render(item) for item in items]
    start = _find_position(found, query, "after") + 1 if "after" in query else 0
    return {"object": "list", **_describe_page(found[start : start + limit], start + limit < len(found))}


def make_anthropic_page(
    items: Sequence[Item], query: Mapping[str, str], render: Callable[[Item], dict[str, Any]]
) -> dict[str, Any]:
    """Build Anthropic's list object: `limit` items behind `after_id`, or just before `before_id`."""
    limit = _read_limit(query, 20, 1000)
    found = [render(item) for item in items]
    if "before_id" in query:
        if "after_id" in query:
            reject("before_id", "not together with after_id")
        end = _find_position(found, query, "before_id")
        return _describe_page(found[max(0, end - limit) : end], end > limit)
    start = _find_position(found, query, "after_id") + 1 if "after_id" in query else 0
    return _describe_page(found[start : start + limit], start + limit < len(found))


def _read_limit(query: Mapping[str, str], default: int, most: int) -> int:
    return parse_number(query.get("limit", str(default)), "limit", 1, most)


def parse_number(text: str, param: str, least: int, most: int, what: str = "a number") -> int:
    """Parse a whole number. RequestError unless it is from `least` to `most`. `what`: for the error's
    text."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        reject(param, f"{quote(text)} is not {what} from {least} to {most}")
    return int(text)


def _find_position(found: Sequence[Mapping[str, Any]], query: Mapping[str, str], name: str) -> int:
    """The position of the item whose id the parameter `name` has."""
    ids = [each["id"] for each in found]
    if query[name] not in ids:
        reject(name, f"{quote(query[name])} is not in this list")
    return ids.index(query[name])


def _describe_page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }
