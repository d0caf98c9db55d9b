"""JSON Schemas as llguidance gets them: checked, with exact bounds of integers, and with its options.

JSON may have one space where white space is allowed, and none around the value. Indentation costs tokens, and
a small model may write line breaks without end.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import Any

from cachetools import LRUCache, cached

from mlxrun.api.structured.exact_numbers import check_numbers
from mlxrun.api.structured.grammar_checks import check_length, check_schema, check_schema_count
from mlxrun.api.structured.schema_rewrites import bound_integers
from mlxrun.core.field_errors import check_type, reject
from mlxrun.core.workers import check_abandoned

WHITESPACE = " ?"
MAX_SCHEMA_CHARACTERS = 4 << 20  # of the cached schemas that llguidance gets


def encode_schema(schema: Any, strict: bool, param: str) -> str:
    """Encode a schema with llguidance's options in it, which replace those that the schema itself has.
    RequestError naming the field `param` if it is invalid. `strict`: see compile_grammar."""
    if not isinstance(schema, bool):
        check_type(schema, dict, param)
    try:  # before anything looks into it: jsonschema takes minutes for a schema of many megabytes
        text = json.dumps(schema)
    except RecursionError:
        reject(param, "is nested too deeply")
    check_length(len(text), param)
    return _encode_new_schema(text, schema, strict, param)


encoded_schemas: LRUCache[tuple[bytes, bool], str] = LRUCache(MAX_SCHEMA_CHARACTERS, len)


@cached(
    encoded_schemas,
    key=lambda text, schema, strict, param: (hashlib.sha256(text.encode()).digest(), strict),
    lock=threading.Lock(),
)
def _encode_new_schema(text: str, schema: Any, strict: bool, param: str) -> str:
    """Check and encode a schema. Once for each `text`, its JSON: agents send the same tools each time."""
    check_abandoned()
    check_schema_count([schema], param)
    check_schema(schema, param, strict)
    if not isinstance(schema, bool):
        check_numbers(schema, param)
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": False}
    members = {"allOf": [schema]} if isinstance(schema, bool) else bound_integers(schema)
    return json.dumps(members | {"x-guidance": options})
