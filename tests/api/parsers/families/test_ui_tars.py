"""The cases of UI-TARS."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestUiTars(FamilyCases):
    names = ("ui_tars",)
