"""The cases of LongCat."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestLongcat(FamilyCases):
    names = ("longcat",)
