"""Anthropic's typed tools that the client runs (shell, text editor and memory), as functions with a schema.

Anthropic's models know these tools by their type, so a body has no schema of them. Other models get the
schema that Anthropic documents, and call the tools as any function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxrun.api.anthropic.fields import TOOL_OPTIONS
from mlxrun.api.anthropic.tagged_schema import Tagged, check_tagged
from mlxrun.api.body_schema import Schema, object_of
from mlxrun.core.field_errors import reject_unsupported

Json = dict[str, Any]

_PATH: Schema = {"type": "string", "description": "Absolute path of the file or directory."}
_OLD: Schema = {"type": "string", "description": "str_replace: the text to replace, which must occur once."}
_NEW: Schema = {"type": "string", "description": "str_replace: the text that replaces it."}
_FILE_TEXT: Schema = {"type": "string", "description": "create: the whole text of the file."}
_LINE: Schema = {
    "type": "integer",
    "description": "insert: the line after which to insert; 0: at the top.",
}
_INSERTED: Schema = {"type": "string", "description": "insert: the text to insert."}
_RANGE: Schema = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "view: the first and the last line to show, from 1 on; -1 is the last line of the file.",
}
_EDITOR = (
    "Views and edits text files. view shows a file with line numbers, or lists a directory; create writes a "
    "new file; str_replace replaces one occurrence of a text; insert adds text after a line"
)


def _make_commands(names: tuple[str, ...], fields: Mapping[str, Schema]) -> Schema:
    command = {"type": "string", "enum": list(names), "description": "What to do."}
    required = ["command", "path"] if "path" in fields else ["command"]
    return {"type": "object", "properties": {"command": command, **fields}, "required": required}


_EDITOR_FIELDS = {"path": _PATH, "view_range": _RANGE, "file_text": _FILE_TEXT, "old_str": _OLD}
_BASH = {
    "name": "bash",
    "description": "Runs commands in a bash shell that keeps its state between calls; returns the output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run. Required unless restarting."},
            "restart": {"type": "boolean", "description": "true: restart the shell instead."},
        },
    },
}
# Insertions of this one are written to new_str, of the newer one to insert_text, as Anthropic's models do.
_OLD_EDITOR = {
    "name": "str_replace_editor",
    "description": f"{_EDITOR}; undo_edit reverts the last edit of a file.",
    "parameters": _make_commands(
        ("view", "create", "str_replace", "insert", "undo_edit"),
        {
            **_EDITOR_FIELDS,
            "new_str": {**_NEW, "description": f"{_NEW['description']} {_INSERTED['description']}"},
            "insert_line": _LINE,
        },
    ),
}
_EDIT_TOOL = {
    "name": "str_replace_based_edit_tool",
    "description": f"{_EDITOR}.",
    "parameters": _make_commands(
        ("view", "create", "str_replace", "insert"),
        {**_EDITOR_FIELDS, "new_str": _NEW, "insert_line": _LINE, "insert_text": _INSERTED},
    ),
}
_MEMORY = {
    "name": "memory",
    "description": "Keeps notes for later conversations, as files in /memories. Look there first, with view. "
    "create writes a file; str_replace and insert edit one; delete and rename are for files and directories.",
    "parameters": _make_commands(
        ("view", "create", "str_replace", "insert", "delete", "rename"),
        {
            **{name: schema for name, schema in _EDITOR_FIELDS.items() if name != "path"},
            "path": {"type": "string", "description": "Path in /memories; of all commands but rename."},
            "new_str": _NEW,
            "insert_line": _LINE,
            "insert_text": _INSERTED,
            "old_path": {"type": "string", "description": "rename: the present path."},
            "new_path": {"type": "string", "description": "rename: the new path."},
        },
    )
    | {"required": ["command"]},
}
TYPED_TOOLS: dict[str, Json] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDIT_TOOL,
    "text_editor_20250728": _EDIT_TOOL,
    "memory_20250818": _MEMORY,
}
_LIMIT: dict[str, Schema] = {"max_characters": {"type": "integer", "minimum": 1}}
TYPED_SCHEMA = Tagged(
    {
        kind: object_of(
            {"name": {"const": tool["name"]}},
            TOOL_OPTIONS | (_LIMIT if kind == "text_editor_20250728" else {}),
        )
        for kind, tool in TYPED_TOOLS.items()
    }
)
_REFUSED = {
    "computer": "there is no screen; describe it as a custom tool",
    "browser": "there is no browser; describe it as a custom tool",
    "mcp": "there is no MCP connector",
}
_SERVER_TOOL = "there are no server tools; describe it as a custom tool"


def read_typed_tool(value: Json, where: str) -> tuple[Json, Json]:
    """Return the fields of a typed tool, and the function for it. RequestError if the type is unknown."""
    kind = str(value["type"])
    if kind not in TYPED_TOOLS:
        reason = _REFUSED.get(kind.partition("_")[0], _SERVER_TOOL)
        reject_unsupported(f"{where}.type", f"{kind[:80]!r}: {reason}")
    fields = check_tagged(value, where, TYPED_SCHEMA)
    function = dict(TYPED_TOOLS[kind])
    if "max_characters" in fields:
        most = fields["max_characters"]
        function["description"] += f" view returns at most {most} characters of a file."
    return fields, function
