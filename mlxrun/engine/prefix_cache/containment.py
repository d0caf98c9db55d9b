"""Contains failures of the prefix cache: they cost time, but never an answer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self")


def contain_failures(
    make_default: Callable[[], Any],
) -> Callable[[Callable[Concatenate[Self, P], T]], Callable[Concatenate[Self, P], T]]:
    """Decorate a method: a failure is logged, once per object, and the method returns `make_default()`."""

    def decorate(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
        @functools.wraps(method)
        def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                if not getattr(self, "_failed", False):
                    log.exception("the prefix cache failed; requests go on without it (logged once)")
                self._failed = True  # type: ignore[attr-defined]
                default: T = make_default()
                return default

        return call

    return decorate
