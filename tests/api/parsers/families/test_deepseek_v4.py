"""The cases of DeepSeek V4 and V4.1."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestDeepseekV4(FamilyCases):
    names = ("deepseek_v4", "deepseek_v41")
