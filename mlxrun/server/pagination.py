"""OpenAI's lists: the parameters of their URLs, and their pages. An unknown parameter is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web

from mlxrun.text.field_errors import UNKNOWN, quote, reject, shorten, suggest

Item = TypeVar("Item")


def read_query(request: web.Request, allowed: Sequence[str]) -> dict[str, str]:
    """The parameters of the URL. RequestError names one that is not `allowed`."""
    for name in request.query:
        if name not in allowed:
            hint = suggest(name, allowed)
            reject(shorten(name), f"unknown parameter{hint}", code=UNKNOWN)
    return dict(request.query)


def sort_by_order(newest_first: Sequence[Item], query: Mapping[str, str]) -> list[Item]:
    """Items, newest first, in the `order` of the query."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        reject("order", f"{quote(order)} is neither 'asc' nor 'desc'")
    return list(newest_first) if order == "desc" else list(reversed(newest_first))


def make_page(
    items: Sequence[Item],
    query: Mapping[str, str],
    render: Callable[[Item], dict[str, Any]],
    *,
    default: int | None = None,
    most: int,
) -> dict[str, Any]:
    """OpenAI's list object: `limit` of the items after the one whose id is `after`."""
    limit = query.get("limit", str(default or most))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        reject("limit", f"{quote(limit)} is not a number from 1 to {most}")
    found = [render(item) for item in items]
    start = 0
    if "after" in query:
        ids = [each["id"] for each in found]
        if query["after"] not in ids:
            reject("after", f"{quote(query['after'])} is not in this list")
        start = ids.index(query["after"]) + 1
    data = found[start : start + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(found),
    }
