"""What any user but root sees: the permissions of files hold. Root obeys them without two capabilities of
Linux, which are taken from it for a while, or from a process for good."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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


@contextmanager
def obey_permissions() -> Iterator[None]:
    """On this thread, and on those that it starts meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("root may read and write everything")
    data = (_Data * 2)()
    _call("capget", data)
    before = data[0].effective
    data[0].effective = before & ~sum(1 << number for number in _OVERRIDES)
    _call("capset", data)
    try:
        yield
    finally:
        data[0].effective = before
        _call("capset", data)


def drop_overrides() -> None:
    """In a child before its program starts: the program obeys permissions."""
    if os.geteuid() == 0:
        library = ctypes.CDLL(None, use_errno=True)
        for number in _OVERRIDES:
            if library.prctl(_DROP_FOR_GOOD, number, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
