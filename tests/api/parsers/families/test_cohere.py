"""The cases of Cohere."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestCohere(FamilyCases):
    names = ("cohere", "command_r")
