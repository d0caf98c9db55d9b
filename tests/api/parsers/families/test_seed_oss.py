"""The cases of Seed-OSS."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestSeedOss(FamilyCases):
    names = ("seed_oss",)
