"""The cases of gpt-oss."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestHarmony(FamilyCases):
    names = ("harmony",)
