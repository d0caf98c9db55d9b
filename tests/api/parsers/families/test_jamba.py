"""The cases of Jamba, Apriel and MiniMax M1."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestJamba(FamilyCases):
    names = ("jamba",)
