"""JSON objects, one a line, each with a digest of all bytes before it. Damaged ones are left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_CHECK = b',"check":"'


def dump_checked(value: Mapping[str, Any], person: bytes) -> bytes:
    """Dump an object with at least one key as a line. `person`: at most 16 bytes, the format of the file."""
    data = json.dumps(value, separators=(",", ":")).encode()[:-1]
    return data + _CHECK + _digest(data, person) + b'"}\n'


def parse_checked(lines: Iterable[bytes], person: bytes) -> Iterator[dict[str, Any]]:
    """Yield the objects, without their checks, of the lines of this format that are whole."""
    for data in lines:
        head, mark, check = data.rpartition(_CHECK)
        if mark and check == _digest(head, person) + b'"}\n':
            yield json.loads(head + b"}")


def _digest(data: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8, person=person).hexdigest().encode()
