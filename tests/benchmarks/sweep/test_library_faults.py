"""The scripts of docs/models.md that show faults of mlx-vlm. Once one is mended, its way around can go."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.sweep.library_faults import FAULTS, PREAMBLE, LibraryFault, render_faults
from benchmarks.tiny.vision_families import VISION


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.families[0])
def test_the_fault_is_still_there(fault: LibraryFault) -> None:
    """The last line that the script prints is the fault. A processor may print others before."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + fault.script], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == [fault.shows], done.stderr


def test_the_page_has_each_script_with_its_families() -> None:
    page = "\n".join(render_faults())
    assert all(fault.script in page and f"# {fault.shows}" in page for fault in FAULTS)
    assert {family for fault in FAULTS for family in fault.families} <= VISION.keys()
