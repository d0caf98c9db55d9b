"""The cases of Qwen3-Coder, Qwen 3.5, Nemotron 3."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestQwen3Coder(FamilyCases):
    names = ("qwen3_coder",)
