"""Every field of a Responses body is honoured, harmless or refused by name."""

from __future__ import annotations

import pytest

from mlxrun.api.responses.fields import HARMLESS, HONOURED, REFUSED
from tests.helpers.responses_api import refused


def test_every_field_is_known_once() -> None:
    assert not (HONOURED.keys() & HARMLESS.keys()) and not (HONOURED.keys() & REFUSED.keys())
    assert not (HARMLESS.keys() & REFUSED.keys())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_are_named(name: str) -> None:
    error = refused(**{name: {}})
    assert (error.param, error.code) == (name, "unsupported_parameter")
