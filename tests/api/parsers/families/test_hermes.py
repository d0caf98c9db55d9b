"""The cases of Hermes 2/3, Qwen 2.5 and 3, Nemotron."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestHermes(FamilyCases):
    names = ("hermes",)
