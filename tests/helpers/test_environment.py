"""In which environment tests compute: a fixed one, or by `make test-product` that of the product."""

from __future__ import annotations

import os
import platform

from mlxrun.model.machine import device


def test_the_environment_is_the_one_that_was_asked_for() -> None:
    is_product = os.environ.get("TEST_ENVIRONMENT") == "product"
    assert (device.STEP_MS == 200) is is_product
    assert ("OPENBLAS_NUM_THREADS" in os.environ) is not is_product
    if platform.machine() == "x86_64":
        assert ("OPENBLAS_CORETYPE" in os.environ) is not is_product
