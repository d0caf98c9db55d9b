"""The cases of GigaChat 3."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestGigachat3(FamilyCases):
    names = ("gigachat3", "gigachat31", "gigachat35")
