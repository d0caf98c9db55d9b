"""The cases of Mistral."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestMistral(FamilyCases):
    names = ("mistral", "mistral_v3")
