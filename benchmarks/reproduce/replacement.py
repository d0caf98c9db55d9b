"""Replaces names for a while, for conditions and for twins that no setting makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_name(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a module or a class, and restore it at the end."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
