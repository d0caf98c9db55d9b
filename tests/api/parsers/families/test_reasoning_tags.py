"""Reasoning between two tags, without tool calls."""

from __future__ import annotations

from tests.helpers.family_cases import FamilyCases


class TestReasoningTags(FamilyCases):
    names = (None,)
