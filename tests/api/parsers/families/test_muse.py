"""The cases of Muse."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestMuse(FamilyCases):
    names = ("muse",)
