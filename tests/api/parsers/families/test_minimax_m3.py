"""The cases of MiniMax M3."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestMinimaxM3(FamilyCases):
    names = ("minimax_m3",)
