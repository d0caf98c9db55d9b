"""OpenAI's /v1/conversations. A response of a conversation begins with its items, and adds items to it.

Conversations are stored with the responses, within server.store_responses and server.store_bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from mlxrun.api.responses.fields import INCLUDES
from mlxrun.api.responses.input_items import CREATE, ITEMS, UPDATE, build_conversation, read_new_items
from mlxrun.core.errors import NotFound, RequestError
from mlxrun.core.field_errors import quote, reject_choice, reject_unsupported
from mlxrun.server.http.access import CONFIG, key_name
from mlxrun.server.http.json_bodies import json_response, read_json
from mlxrun.server.http.pagination import make_page, read_query, sort_by_order
from mlxrun.server.http.surface import Endpoint
from mlxrun.server.responses.response_runs import RESPONSES
from mlxrun.server.responses.response_store import Item, StoredObject


def _find(request: web.Request) -> StoredObject:
    name = request.match_info["id"]
    return request.app[RESPONSES].find_stored(key_name(request), name, "conversation")


async def _read_items(
    request: web.Request, given: dict[str, Any], known: Sequence[Item] = ()
) -> tuple[Item, ...]:
    """The new items of a body, for a conversation that has the known ones."""
    lookup = request.app[RESPONSES].make_lookup(key_name(request)).item
    strict = request.app[CONFIG].server.strict_fields
    token = request.app[RESPONSES].make_token()
    return await asyncio.to_thread(read_new_items, given.get("items", []), known, token, lookup, strict)


def read_include_query(request: web.Request, known: Sequence[str]) -> dict[str, str]:
    """Read a query that may have `include`. Its values are only checked: responses have all in any case."""
    query = read_query(request, (*known, "include", "include[]"))
    for name in ("include", "include[]"):
        for value in request.query.getall(name, ()):
            if value not in INCLUDES:
                reject_choice("include", value, INCLUDES)
    return query


async def _store(request: web.Request, body: dict[str, Any], items: Sequence[Item]) -> None:
    """Store a conversation, in place of what it was. RequestError if it is too large; then it is deleted."""
    if not await request.app[RESPONSES].store_conversation(key_name(request), body, items):
        text = "items: with them the conversation is larger than server.store_bytes; it was not stored"
        raise RequestError(text, param="items")


async def create_conversation(request: web.Request) -> web.Response:
    """Create a conversation, with items or without."""
    strict = request.app[CONFIG].server.strict_fields
    given = CREATE.check(await read_json(request), strict=strict)
    if not request.app[RESPONSES].stores_any:
        reject_unsupported("conversations", "the server stores none (server.store_responses)")
    items = await _read_items(request, given)
    conversation = build_conversation(f"conv_{request.app[RESPONSES].make_token()}", int(time.time()), given)
    await _store(request, conversation, items)
    return json_response(conversation)


async def get_conversation(request: web.Request) -> web.Response:
    """Retrieve a conversation without its items."""
    return json_response(_find(request).body)


async def update_conversation(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    given = UPDATE.check(await read_json(request))
    with request.app[RESPONSES].lock_conversation(key_name(request), request.match_info["id"]):
        found = _find(request)
        body = {**found.body, "metadata": given.get("metadata", {})}
        await _store(request, body, found.items)
    return json_response(body)


async def delete_conversation(request: web.Request) -> web.Response:
    """Delete a conversation. Responses that belong to it keep its items."""
    name, owner, responses = request.match_info["id"], key_name(request), request.app[RESPONSES]
    with responses.lock_conversation(owner, name):
        _find(request)
        await responses.delete(owner, name)
    return json_response({"id": name, "object": "conversation.deleted", "deleted": True})


async def create_items(request: web.Request) -> web.Response:
    """Add items at the end of a conversation."""
    read_include_query(request, ())
    given = ITEMS.check(await read_json(request), strict=request.app[CONFIG].server.strict_fields)
    with request.app[RESPONSES].lock_conversation(key_name(request), request.match_info["id"]):
        found = _find(request)
        items = await _read_items(request, given, found.items)
        await _store(request, found.body, (*found.items, *items))
    return json_response(make_page(items, {}, dict, default=max(1, len(items)), most=max(1, len(items))))


async def list_items(request: web.Request) -> web.Response:
    """List the items of a conversation, newest first unless `order` is asc."""
    query = read_include_query(request, ("limit", "order", "after"))
    items = sort_by_order(_find(request).items[::-1], query)
    return json_response(make_page(items, query, dict))


async def get_item(request: web.Request) -> web.Response:
    """Retrieve one item of a conversation."""
    read_include_query(request, ())
    return json_response(_find(request).items[_find_index(request)])


async def delete_item(request: web.Request) -> web.Response:
    """Delete one item from a conversation, and return the conversation."""
    with request.app[RESPONSES].lock_conversation(key_name(request), request.match_info["id"]):
        found, at = _find(request), _find_index(request)
        await _store(request, found.body, (*found.items[:at], *found.items[at + 1 :]))
    return json_response(found.body)


def _find_index(request: web.Request) -> int:
    name = request.match_info["item"]
    for at, item in enumerate(_find(request).items):
        if item["id"] == name:
            return at
    raise NotFound(f"the conversation has no item {quote(name)}")


_ONE = "/v1/conversations/{id}"
_ITEM = f"{_ONE}/items/{{item}}"
ENDPOINTS = (
    Endpoint(
        "POST", "/v1/conversations", create_conversation, "Create a conversation", CREATE.schema, engine=False
    ),
    Endpoint("GET", _ONE, get_conversation, "Retrieve a conversation", engine=False),
    Endpoint("POST", _ONE, update_conversation, "Replace its metadata", UPDATE.schema, engine=False),
    Endpoint("DELETE", _ONE, delete_conversation, "Delete a conversation", engine=False),
    Endpoint("POST", f"{_ONE}/items", create_items, "Add items", ITEMS.schema, engine=False),
    Endpoint("GET", f"{_ONE}/items", list_items, "List the items of a conversation", engine=False),
    Endpoint("GET", _ITEM, get_item, "Retrieve an item of a conversation", engine=False),
    Endpoint("DELETE", _ITEM, delete_item, "Delete an item from a conversation", engine=False),
)
