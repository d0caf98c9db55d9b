"""The cases of MiniCPM5."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestMinicpm5(FamilyCases):
    names = ("minicpm5",)
