"""The bodies of OpenAI's /v1/conversations, and the objects that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxrun.api.body_schema import LIST, METADATA, BodySchema
from mlxrun.api.responses.fields import INCLUDE
from mlxrun.api.responses.input_items import Item, ItemSource, check_item_ids, read_input_items

CREATE = BodySchema({"items": LIST, "metadata": METADATA})
UPDATE = BodySchema({"metadata": METADATA})
ITEMS = BodySchema({"items": LIST, "include": INCLUDE})


def build_conversation(conversation_id: str, created: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """A new conversation, without its items."""
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": created,
        "metadata": given.get("metadata", {}),
    }


def read_new_items(
    value: Any, known: Sequence[Item], token: str, lookup: Callable[[str], Item | None], strict: bool
) -> tuple[Item, ...]:
    """Checks items for a conversation that has the known ones; see ItemSource for the last three."""
    items = read_input_items(value, ItemSource(token, lookup, strict, "items"))
    check_item_ids(items, known, "the conversation")
    return tuple(each.item for each in items)
