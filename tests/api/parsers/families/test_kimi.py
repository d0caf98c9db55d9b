"""The cases of Kimi K2."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestKimi(FamilyCases):
    names = ("kimi_k2",)
