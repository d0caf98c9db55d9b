"""The cases of Phi-4-mini."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestPhi(FamilyCases):
    names = ("phi4_mini",)
