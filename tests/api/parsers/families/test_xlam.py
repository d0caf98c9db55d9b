"""The cases of xLAM."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestXlam(FamilyCases):
    names = ("xlam",)
