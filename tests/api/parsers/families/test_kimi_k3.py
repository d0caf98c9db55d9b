"""The cases of Kimi K3."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestKimiK3(FamilyCases):
    names = ("kimi_k3",)
