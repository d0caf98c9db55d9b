"""The cases of InternLM 2 and Intern-S1."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestInternlm2(FamilyCases):
    names = ("internlm2",)
