"""What the writers of all forms share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Write = Callable[[str, dict[str, Any]], str]


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """Strings as they are, all else as JSON."""
    return value if isinstance(value, str) else dump(value)


def python_call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
