"""The cases of Hunyuan A13B."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestHunyuan(FamilyCases):
    names = ("hunyuan_v3", "hunyuan_a13b")
