"""What any user but root sees: the permissions of files hold. Root obeys them without two capabilities of
Linux, which are taken from it for a while, or from a process for good."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OVERRIDES = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
_DROP_FOR_GOOD = 24  # PR_CAPBSET_DROP
_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Data(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _call(name: str, data: ctypes.Array[_Data]) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(ctypes.byref(_Header(_VERSION, 0)), data) != 0:
        raise OSError(ctypes.get_errno(), name)


def _choose_capabilities(choose: Callable[[int], int]) -> int:
    """Let this thread use the capabilities that `choose` makes of those that it uses. Returns the latter."""
    data = (_Data * 2)()
    _call("capget", data)
    before = data[0].effective
    data[0].effective = choose(before)
    _call("capset", data)
    return int(before)


def _leave_out_overrides(effective: int) -> int:
    return effective & ~sum(1 << number for number in _OVERRIDES)


@contextmanager
def obey_permissions() -> Iterator[None]:
    """On this thread, and on those that it starts meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        import pytest

        pytest.skip("root may read and write everything")
    before = _choose_capabilities(_leave_out_overrides)
    try:
        yield
    finally:
        _choose_capabilities(lambda _: before)


def drop_overrides() -> None:
    """For good, in a program that has one thread yet: it obeys permissions, and so does what it starts."""
    if os.geteuid() == 0:
        library = ctypes.CDLL(None, use_errno=True)
        for number in _OVERRIDES:
            if library.prctl(_DROP_FOR_GOOD, number, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
        _choose_capabilities(_leave_out_overrides)
