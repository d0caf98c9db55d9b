"""The cases of Functionary."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestFunctionary(FamilyCases):
    names = ("functionary", "functionary_v2", "functionary_v25", "functionary_v31")
