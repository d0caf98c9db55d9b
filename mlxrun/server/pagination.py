"""OpenAI's lists: the parameters of their URLs, and one page of them. An unknown parameter is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mlxrun.text.field_errors import UNKNOWN, bad, quote, shorten, suggest

if TYPE_CHECKING:
    from aiohttp import web

Item = TypeVar("Item")


def read_query(request: web.Request, allowed: Sequence[str]) -> dict[str, str]:
    """The parameters of the URL."""
    for name in request.query:
        if name not in allowed:
            hint = suggest(name, allowed)
            raise bad(shorten(name), f"unknown parameter{hint}", code=UNKNOWN)
    return dict(request.query)


def in_order(newest: Sequence[Item], query: Mapping[str, str]) -> list[Item]:
    """Items that come the newest first, as `order` wants them."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad("order", f"{quote(order)} is neither 'asc' nor 'desc'")
    return list(newest) if order == "desc" else list(reversed(newest))


def page(
    items: Sequence[Item],
    query: Mapping[str, str],
    body: Callable[[Item], dict[str, Any]],
    *,
    usual: int | None = None,
    most: int,
) -> dict[str, Any]:
    """OpenAI's list object: `limit` of the items that come after the one whose id is `after`."""
    limit = query.get("limit", str(usual or most))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise bad("limit", f"{quote(limit)} is not a number from 1 to {most}")
    found = [body(item) for item in items]
    start = 0
    if "after" in query:
        ids = [each["id"] for each in found]
        if query["after"] not in ids:
            raise bad("after", f"{quote(query['after'])} is not in this list")
        start = ids.index(query["after"]) + 1
    data = found[start : start + int(limit)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + len(data) < len(found),
    }
