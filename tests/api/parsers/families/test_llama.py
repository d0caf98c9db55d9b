"""The cases of Llama 3.1 to 4."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestLlama(FamilyCases):
    names = ("llama",)
