"""The cases of calls written as Python."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestPythonic(FamilyCases):
    names = ("pythonic",)
