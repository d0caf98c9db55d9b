"""Warnings that are logged once are logged again in each test."""

from __future__ import annotations

import pytest

from mlxrun.api.responses.tools import warn_once


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    warn_once.cache_clear()
