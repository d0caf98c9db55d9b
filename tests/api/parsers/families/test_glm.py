"""The cases of GLM 4.5 to 4.7."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestGlm(FamilyCases):
    names = ("glm",)
