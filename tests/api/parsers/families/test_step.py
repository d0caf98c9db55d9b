"""The cases of Step 3.5."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestStep(FamilyCases):
    names = ("step",)
