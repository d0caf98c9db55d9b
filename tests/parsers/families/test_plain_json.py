"""The cases of plain JSON, for models of no known format."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestPlainJson(FamilyCases):
    names = ("json",)
