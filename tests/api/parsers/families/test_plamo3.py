"""The cases of PLaMo 3."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestPlamo3(FamilyCases):
    names = ("plamo3",)
