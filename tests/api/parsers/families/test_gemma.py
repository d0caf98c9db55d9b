"""The cases of Gemma 4."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestGemma(FamilyCases):
    names = ("gemma4", "function_gemma")
