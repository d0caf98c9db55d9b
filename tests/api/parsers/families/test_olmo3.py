"""The cases of OLMo 3."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestOlmo3(FamilyCases):
    names = ("olmo3",)
