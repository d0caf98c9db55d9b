"""The cases of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestDeepseek(FamilyCases):
    names = ("deepseek_v3", "deepseek_v31", "deepseek_v32")
