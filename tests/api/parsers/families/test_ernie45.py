"""The cases of ERNIE 4.5."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestErnie45(FamilyCases):
    names = ("ernie45",)
