"""Input items of a Responses body, checked and brought into the one form that is stored and listed.

Every item gets an id and every content becomes parts. An item or a field that is not known is refused by
name. A content part of an unknown type that has a text is taken as text, with a warning in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.api.opaque_reasoning import decode_reasoning
from mlxrun.api.responses.tools import warn_once
from mlxrun.text.field_errors import (
    check_keys,
    check_type,
    get_json_type,
    quote,
    reject,
    reject_unsupported,
    suggest,
)

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
_ANY_TIME = ("type", "id", "status")
_CALL = (*_ANY_TIME, "call_id", "name", "namespace", "caller", "async")
_OUTPUT = (*_ANY_TIME, "call_id", "name", "namespace", "caller", "output")
_KEYS = {
    "message": (*_ANY_TIME, "role", "content", "phase", "end_turn"),
    "reasoning": (*_ANY_TIME, "summary", "content", "encrypted_content"),
    "function_call": (*_CALL, "arguments"),
    "function_call_output": _OUTPUT,
    "custom_tool_call": (*_CALL, "input"),
    "custom_tool_call_output": _OUTPUT,
    "item_reference": ("type", "id"),
}
# Items of tools that never ran here, and of services that only the original has.
_REFUSED = (
    *("file_search_call", "web_search_call", "image_generation_call", "code_interpreter_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output", "additional_tools", "compaction", "compaction_summary"),
)
_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_REFUSED_PARTS = ("input_file", "input_audio", "input_video", "computer_screenshot")


@dataclass(frozen=True, slots=True)
class InputItem:
    """An item and the field of the body that it came from."""

    item: Item
    param: str


def read_input_items(value: Any, token: str, lookup: Callable[[str], Item | None]) -> list[InputItem]:
    """The items of `input`. `token` is what new ids are made of, `lookup` finds what a reference means."""
    if isinstance(value, str):
        parts = [{"type": "input_text", "text": value}]
        item = {"id": f"msg_{token}in00", "type": "message", "status": "completed"}
        return [InputItem(item | {"role": "user", "content": parts}, "input")]
    return [_item(item, f"input[{i}]", f"{token}in{i:02d}", lookup) for i, item in enumerate(value)]


def _item(value: Any, param: str, token: str, lookup: Callable[[str], Item | None]) -> InputItem:
    given = {key: each for key, each in check_type(value, dict, param).items() if each is not None}
    of = check_type(given.get("type", "message" if "role" in given else None), str, f"{param}.type")
    if of in _REFUSED:
        reject_unsupported(f"{param}.type", f"{of!r} items; tools of the original are not run here")
    if of not in _KEYS:
        reject(f"{param}.type", f"{quote(of)} is not one of {', '.join(_KEYS)}{suggest(of, _KEYS)}")
    check_keys(given, _KEYS[of], param)
    name = check_type(given.get("id", f"{_PREFIX.get(of, '')}_{token}"), str, f"{param}.id")
    if of == "item_reference":
        found = lookup(name)
        if found is None:
            reject(f"{param}.id", f"there is no stored item {quote(name)}")
        return InputItem(found, param)
    head: Item = {"id": name, "type": of}
    if of != "reasoning":
        status = given.get("status", "completed")
        head["status"] = check_type(status, str, f"{param}.status")
    return InputItem(head | _READERS[of](given, param), param)


def _message(given: Mapping[str, Any], param: str) -> Item:
    role = given.get("role")
    if role is None:
        reject(f"{param}.role", "missing", code="missing_field")
    if check_type(role, str, f"{param}.role") not in ROLES:
        reject(f"{param}.role", f"{quote(role)} is not one of {', '.join(ROLES)}{suggest(role, ROLES)}")
    content = given.get("content")
    if isinstance(content, str):
        return {"role": role, "content": [_text(content, role)]}
    return {"role": role, "content": _parts(content, f"{param}.content", role)}


def _text(text: str, role: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _parts(content: Any, param: str, role: str) -> list[Item]:
    if content is None:
        reject(param, "missing", code="missing_field")
    if not isinstance(content, list):
        reject(
            param,
            f"expected a string or an array of parts, got {get_json_type(content)}",
            code="invalid_type",
        )
    return [_part(part, f"{param}[{i}]", role) for i, part in enumerate(content)]


def _part(part: Any, param: str, role: str) -> Item:
    given = {key: value for key, value in check_type(part, dict, param).items() if value is not None}
    of = given.get("type")
    if of is None:
        reject(f"{param}.type", "missing", code="missing_field")
    check_type(of, str, f"{param}.type")
    if of in _REFUSED_PARTS:
        reject_unsupported(f"{param}.type", f"{of!r} parts; text and input_image are taken")
    if of == "input_image":
        return _image(given, param)
    if of == "refusal":
        check_keys(given, ("type", "refusal"), param)
        return {"type": "refusal", "refusal": check_type(given.get("refusal"), str, f"{param}.refusal")}
    if of not in ("input_text", "output_text", "text", "summary_text", "reasoning_text"):
        if not isinstance(given.get("text"), str):
            reject(f"{param}.type", f"{quote(of)} parts are not known; use input_text or input_image")
        warn_once(f"/v1/responses: content parts of the unknown type {quote(of)} are taken as text")
    else:
        check_keys(
            given, ("type", "text", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"), param
        )
    return _text(check_type(given.get("text"), str, f"{param}.text"), role)


def _image(given: Item, param: str) -> Item:
    check_keys(given, ("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint"), param)
    if "file_id" in given:
        reject_unsupported(f"{param}.file_id", "send the image in image_url, as a data URL")
    url = check_type(given.get("image_url"), str, f"{param}.image_url")
    detail = check_type(given.get("detail", "auto"), str, f"{param}.detail")
    return {"type": "input_image", "image_url": url, "detail": detail}


def _reasoning(given: Mapping[str, Any], param: str) -> Item:
    item: Item = {"summary": [], "content": []}
    for key, of in (("summary", "summary_text"), ("content", "reasoning_text")):
        for i, part in enumerate(check_type(given.get(key, []), list, f"{param}.{key}")):
            where = f"{param}.{key}[{i}]"
            check_type(part, dict, where)
            if part.get("type") not in (of, "text"):
                reject(f"{where}.type", f"{quote(part.get('type'))} is not {of!r}")
            item[key].append({"type": of, "text": check_type(part.get("text"), str, f"{where}.text")})
    encrypted = given.get("encrypted_content")
    if encrypted is None:
        return item
    check_type(encrypted, str, f"{param}.encrypted_content")
    thought = decode_reasoning(encrypted)
    if thought is None:
        warn_once("/v1/responses: encrypted_content of another server cannot be read; it is left out")
    elif not item["content"]:
        item["content"].append({"type": "reasoning_text", "text": thought})
    return item


def _call(given: Mapping[str, Any], param: str) -> Item:
    text = "arguments" if given.get("type") == "function_call" else "input"
    item = {
        "call_id": check_type(given.get("call_id"), str, f"{param}.call_id"),
        "name": check_type(given.get("name"), str, f"{param}.name"),
        text: check_type(given.get(text), str, f"{param}.{text}"),
    }
    if "namespace" in given:
        item["namespace"] = check_type(given["namespace"], str, f"{param}.namespace")
    return item


def _output(given: Mapping[str, Any], param: str) -> Item:
    output = given.get("output")
    if isinstance(output, list):
        output = _parts(output, f"{param}.output", "tool")
    elif not isinstance(output, str):
        reject(f"{param}.output", f"expected a string or an array of parts, got {get_json_type(output)}")
    return {"call_id": check_type(given.get("call_id"), str, f"{param}.call_id"), "output": output}


_READERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _call,
    "custom_tool_call_output": _output,
}
