"""With `--pretend-mac`, processes that tests start see what the tests see."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.child_start import platform_pretence
from tests.helpers.command_processes import run_program

ROOT = Path(__file__).parents[2]
CODE = """
import os, sys
__name__ = "tests.example"
import sys as own
from mlxrun.model.machine import device, memory_limits
from mlxrun.model.machine.device_choice import find_gpu_problem
from pathlib import Path
import mlx.core as mx
print(mx.default_device() == mx.cpu, own.platform, Path("/proc/self/stat").exists(), bool(os.listdir("/")))
print(device.get_backend(), mx.metal.is_available(), bool(find_gpu_problem()), device.read_free_memory() > 0)
__name__ = "elsewhere"
print(Path("/proc/self/stat").exists())
"""


@pytest.mark.skipif(not sys.platform.startswith(("linux", "darwin")), reason="for Linux, and its Mac")
@pytest.mark.parametrize("pretends", [False, True])
def test_a_child_sees_what_its_test_sees(pretends: bool) -> None:
    if not pretends and os.environ.get(platform_pretence.VARIABLE):
        pytest.skip("children pretend too")
    folder = str(Path(platform_pretence.__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(ROOT)))}
    env |= {platform_pretence.VARIABLE: "1"} if pretends else {}
    out = run_program([sys.executable, "-c", CODE], env=env, check=True)
    first, second, third = out.stdout.splitlines()
    if pretends:
        assert first == "True darwin False True"
        assert second == "cpu False True True"
        assert third == "True" or not Path("/proc").exists()
    else:
        assert first.startswith("True ") and second.startswith("cpu ")
