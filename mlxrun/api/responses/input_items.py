"""Reads input items of a Responses body into the one form in which they are stored and listed.

Every item gets an id, and all content becomes parts. An unknown item is refused by name. Clients send back
items of other servers, so an unknown field of an item is ignored. A content part of an unknown type is read
as text if it has one. The log has a line about each. The bodies of /v1/conversations are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.body_schema import LIST, METADATA, BodySchema
from mlxrun.api.opaque_reasoning import decode_reasoning
from mlxrun.api.responses.fields import INCLUDE
from mlxrun.api.responses.tools import warn_once
from mlxrun.api.text.ignored_fields import select_known
from mlxrun.core.field_errors import (
    check_keys,
    check_type,
    get_json_type,
    get_required,
    quote,
    reject,
    reject_choice,
    reject_type,
    reject_unsupported,
)

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
# Items of tools that mlxrun does not run, and of services that only OpenAI has.
_REFUSED = (
    *("file_search_call", "web_search_call", "image_generation_call", "code_interpreter_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "additional_tools", "compaction", "compaction_summary"),
)
_REFUSED_PARTS = ("input_video", "computer_screenshot")

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_IMAGE_KEYS = ("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint")
_FILE_KEYS = ("type", "file_data", "file_url", "file_id", "filename", "detail", "prompt_cache_breakpoint")
_TEXT_KEYS = ("type", "text", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint")


@dataclass(frozen=True, slots=True)
class InputItem:
    """An item. `param`: the field of the body that it came from."""

    item: Item
    param: str


def read_input_items(
    value: Any,
    token: str,
    lookup: Callable[[str], Item | None] = lambda _: None,
    *,
    strict: bool = False,
    param: str = "input",
) -> list[InputItem]:
    """Return the items of the field `param`: a text, or an array of items. RequestError if one is wrong.

    `token`: makes new ids. `lookup`: finds a stored item by id. `strict`: refuse unknown fields."""
    if isinstance(value, str):
        item = {"id": f"msg_{token}in00", "type": "message", "status": "completed"}
        return [InputItem(item | {"role": "user", "content": [_build_text(value, "user")]}, param)]
    return [
        _read_item(item, f"{param}[{i}]", f"{token}in{i:02d}", lookup, strict) for i, item in enumerate(value)
    ]


def check_item_ids(items: Iterable[InputItem], known: Iterable[Item]) -> None:
    """Raise RequestError if two items have one id. `known`: those of the conversation."""
    ids = {item["id"] for item in known}
    for each in items:
        if each.item["id"] in ids:
            reject(f"{each.param}.id", f"the conversation has an item {quote(each.item['id'])} already")
        ids.add(each.item["id"])


def _drop_nulls(value: Any, param: str) -> Item:
    return {key: each for key, each in check_type(value, dict, param).items() if each is not None}


def _read_item(
    value: Any, param: str, token: str, lookup: Callable[[str], Item | None], strict: bool
) -> InputItem:
    given = _drop_nulls(value, param)
    kind = check_type(given.get("type", "message" if "role" in given else None), str, f"{param}.type")
    if kind in _REFUSED:
        reject_unsupported(f"{param}.type", f"{kind!r} items; mlxrun does not run OpenAI's built-in tools")
    if kind == "item_reference":
        check_keys(given, ("type", "id"), param)
        item_id = check_type(given.get("id", ""), str, f"{param}.id")
        found = lookup(item_id)
        if found is None:
            reject(f"{param}.id", f"there is no stored item {quote(item_id)}")
        return InputItem(found, param)
    if kind not in _KINDS:
        reject_choice(f"{param}.type", kind, (*_KINDS, "item_reference"))
    prefix, read, keys = _KINDS[kind]
    given = select_known(given, ("type", "id", "status", *keys), param, strict=strict)
    item_id = check_type(given.get("id", f"{prefix}_{token}"), str, f"{param}.id")
    head: Item = {"id": item_id, "type": kind}
    if kind != "reasoning":
        head["status"] = check_type(given.get("status", "completed"), str, f"{param}.status")
    return InputItem(head | read(given, param, strict), param)


def _read_message(given: Item, param: str, strict: bool) -> Item:
    role = get_required(given, "role", str, param)
    if role not in ROLES:
        reject_choice(f"{param}.role", role, ROLES)
    content = given.get("content")
    if isinstance(content, str):
        return {"role": role, "content": [_build_text(content, role)]}
    return {"role": role, "content": _read_parts(content, f"{param}.content", role, strict)}


def _build_text(text: str, role: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _read_parts(content: Any, param: str, role: str, strict: bool) -> list[Item]:
    if content is None:
        reject(param, "missing", code="missing_field")
    if not isinstance(content, list):
        reject_type(param, content, "a string or an array of parts")
    return [_read_part(part, f"{param}[{i}]", role, strict) for i, part in enumerate(content)]


def _read_part(part: Any, param: str, role: str, strict: bool) -> Item:
    given = _drop_nulls(part, param)
    kind = get_required(given, "type", str, param)
    if kind in _REFUSED_PARTS:
        reject_unsupported(
            f"{param}.type", f"{kind!r} parts; use text, input_image, input_file and input_audio"
        )
    if kind == "input_image":
        return _read_image(given, param, strict)
    if kind == "input_file":
        return _read_file(given, param, strict)
    if kind == "input_audio":
        return _read_audio(given, param, strict)
    if kind == "refusal":
        given = select_known(given, ("type", "refusal"), param, strict=strict)
        return {"type": "refusal", "refusal": check_type(given.get("refusal"), str, f"{param}.refusal")}
    if kind in _TEXT_PARTS:
        given = select_known(given, _TEXT_KEYS, param, strict=strict)
    elif not isinstance(given.get("text"), str):
        reject(
            f"{param}.type",
            f"{quote(kind)} parts are unknown; use input_text, input_image, input_file or input_audio",
        )
    else:
        warn_once("/v1/responses: content parts of unknown types are read as text")
    return _build_text(check_type(given.get("text"), str, f"{param}.text"), role)


def _read_image(given: Item, param: str, strict: bool) -> Item:
    given = select_known(given, _IMAGE_KEYS, param, strict=strict)
    if "file_id" in given:
        reject_unsupported(f"{param}.file_id", "send the image in image_url, as a data URL")
    url = check_type(given.get("image_url"), str, f"{param}.image_url")
    detail = check_type(given.get("detail", "auto"), str, f"{param}.detail")
    return {"type": "input_image", "image_url": url, "detail": detail}


def _read_file(given: Item, param: str, strict: bool) -> Item:
    given = select_known(given, _FILE_KEYS, param, strict=strict)
    if "file_id" in given:
        reject_unsupported(
            f"{param}.file_id", "stored files are not read here; send file_data, as a data URL"
        )
    key = "file_url" if "file_data" not in given else "file_data"
    if "file_url" in given and key == "file_data":
        reject(f"{param}.file_url", "not together with file_data")
    item = {"type": "input_file", key: check_type(given.get(key), str, f"{param}.{key}")}
    if "filename" in given:
        item["filename"] = check_type(given["filename"], str, f"{param}.filename")
    return item


def _read_audio(given: Item, param: str, strict: bool) -> Item:
    given = select_known(given, ("type", "input_audio", "prompt_cache_breakpoint"), param, strict=strict)
    where = f"{param}.input_audio"
    audio = select_known(
        _drop_nulls(given.get("input_audio"), where), ("data", "format"), where, strict=strict
    )
    found = {key: check_type(audio.get(key), str, f"{where}.{key}") for key in ("data", "format")}
    return {"type": "input_audio", "input_audio": found}


def _read_reasoning(given: Item, param: str, _: bool) -> Item:
    item: Item = {"summary": [], "content": []}
    for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        for i, part in enumerate(check_type(given.get(key, []), list, f"{param}.{key}")):
            where = f"{param}.{key}[{i}]"
            check_type(part, dict, where)
            if part.get("type") not in (kind, "text"):
                reject(f"{where}.type", f"{quote(part.get('type'))} is not {kind!r}")
            item[key].append({"type": kind, "text": check_type(part.get("text"), str, f"{where}.text")})
    encrypted = given.get("encrypted_content")
    if encrypted is None:
        return item
    reasoning = decode_reasoning(check_type(encrypted, str, f"{param}.encrypted_content"))
    if reasoning is None:
        warn_once("/v1/responses: encrypted_content of another server cannot be decoded; it is dropped")
    elif not item["content"]:
        item["content"].append({"type": "reasoning_text", "text": reasoning})
    return item


def _read_call(given: Item, param: str, _: bool) -> Item:
    payload = "arguments" if given.get("type") == "function_call" else "input"
    keys = ("call_id", "name", payload, *(("namespace",) if "namespace" in given else ()))
    return {key: check_type(given.get(key), str, f"{param}.{key}") for key in keys}


def _read_output(given: Item, param: str, strict: bool) -> Item:
    output = given.get("output")
    if isinstance(output, list):
        output = _read_parts(output, f"{param}.output", "tool", strict)
    elif not isinstance(output, str):
        found = get_json_type(output)
        reject(f"{param}.output", f"expected a string or an array of parts, got {found}")
    return {"call_id": check_type(given.get("call_id"), str, f"{param}.call_id"), "output": output}


_CALL_KEYS = ("call_id", "name", "namespace", "caller", "async")
_OUTPUT_KEYS = ("call_id", "name", "namespace", "caller", "output")
# By type: the prefix of new ids, the reader, and the fields besides type, id and status.
_KINDS: dict[str, tuple[str, Callable[[Item, str, bool], Item], tuple[str, ...]]] = {
    "message": ("msg", _read_message, ("role", "content", "phase", "end_turn")),
    "reasoning": ("rs", _read_reasoning, ("summary", "content", "encrypted_content")),
    "function_call": ("fc", _read_call, (*_CALL_KEYS, "arguments")),
    "function_call_output": ("fco", _read_output, _OUTPUT_KEYS),
    "custom_tool_call": ("ctc", _read_call, (*_CALL_KEYS, "input")),
    "custom_tool_call_output": ("ctco", _read_output, _OUTPUT_KEYS),
}


CREATE = BodySchema({"items": LIST, "metadata": METADATA})
UPDATE = BodySchema({"metadata": METADATA})
ITEMS = BodySchema({"items": LIST, "include": INCLUDE})


def build_conversation(conversation_id: str, created: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Build a new conversation, without its items. `created`: seconds since 1970."""
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": created,
        "metadata": given.get("metadata", {}),
    }


def read_new_items(
    value: Any, known: Sequence[Item], token: str, lookup: Callable[[str], Item | None], strict: bool
) -> tuple[Item, ...]:
    """Check new items of a conversation that has `known` ones. The rest is as in read_input_items."""
    items = read_input_items(value, token, lookup, strict=strict, param="items")
    check_item_ids(items, known)
    return tuple(each.item for each in items)
