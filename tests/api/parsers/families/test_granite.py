"""The cases of Granite 3 and 4."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestGranite(FamilyCases):
    names = ("granite",)
