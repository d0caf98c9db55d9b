"""A test of families is skipped for the expected refusal only."""

from __future__ import annotations

import pytest

from mlxrun.core.errors import ModelLoadError
from tests.helpers.family_refusals import skip_expected_refusal

REFUSAL = "[metal_kernel] No Metal back-end."


def test_the_expected_refusal_skips() -> None:
    with pytest.raises(pytest.skip.Exception), skip_expected_refusal("text", "bitnet"):
        raise RuntimeError(REFUSAL)


@pytest.mark.parametrize(
    ("family", "error"),
    [
        ("bitnet", ModelLoadError("the load check failed")),
        ("llama", RuntimeError(REFUSAL)),
        ("olmo", SystemExit(3)),
    ],
)
def test_other_errors_are_failures(family: str, error: BaseException) -> None:
    with pytest.raises(type(error)), skip_expected_refusal("text", family):
        raise error
