"""The cases of MiniMax M2."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestMinimax(FamilyCases):
    names = ("minimax_m2",)
