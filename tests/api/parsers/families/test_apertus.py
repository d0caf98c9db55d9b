"""The cases of Apertus."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestApertus(FamilyCases):
    names = ("apertus",)
