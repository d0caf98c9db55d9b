"""The scripts of docs/models.md that show faults of mlx-vlm. Once one is mended, its way around can go."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.sweep.library_faults import FAULTS, PREAMBLE, LibraryFault, render_faults
from benchmarks.tiny.vision_families import VISION
from tests.helpers.command_processes import run_program
from tests.helpers.model_fixtures import mark_sweep

# Of prompts with several media, which few models have, in the sweep.
SLOW = ("gemma4", "gemma4_unified", "nemotron_h_nano_omni", "inkling", "mimo_v2")
QUICK = [fault for fault in FAULTS if fault.families[0] not in SLOW]


# Runs each script of its input as a program of its own: most of the time of one is that of its imports.
RUN_ALL = """
import contextlib, io, json, sys, traceback
for script in json.load(sys.stdin):
    printed, problem = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(script, {"__name__": "__main__"})
    except Exception:
        problem = traceback.format_exc()
    print(json.dumps([printed.getvalue(), problem]))
"""


def run_scripts(faults: Sequence[LibraryFault]) -> dict[LibraryFault, tuple[list[str], str]]:
    """The lines that the script of each prints, and its error."""
    scripts = json.dumps([PREAMBLE + fault.script for fault in faults])
    with tempfile.TemporaryFile("w+") as file:
        file.write(scripts)
        file.seek(0)
        done = run_program([sys.executable, "-c", RUN_ALL], stdin=file)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {
        fault: (printed.splitlines(), problem)
        for fault, (printed, problem) in zip(faults, found, strict=True)
    }


@pytest.fixture(scope="module")
def quick() -> dict[LibraryFault, tuple[list[str], str]]:
    return run_scripts(QUICK)


@pytest.mark.parametrize("fault", mark_sweep(FAULTS, QUICK), ids=lambda fault: fault.families[0])
def test_the_fault_is_still_there(
    fault: LibraryFault, quick: dict[LibraryFault, tuple[list[str], str]]
) -> None:
    """The last line that the script prints is the fault. A processor may print others before."""
    lines, problem = quick[fault] if fault in quick else run_scripts([fault])[fault]
    assert not problem and lines[-1:] == [fault.shows], problem


def test_each_refusal_of_the_page_has_a_script() -> None:
    """Of a family, of its sound, and of prompts with several media."""
    page = Path(__file__).parents[3] / "docs/models.md"
    rows = [line.split("|") for line in page.read_text().splitlines() if line.startswith("| `")]
    refused = {name.strip(" `") for _, name, *cells in rows if any("refused" in cell for cell in cells)}
    assert {"gemma3n", "mllama", "gemma4"} <= refused
    assert refused <= {family for fault in FAULTS for family in fault.families}


def test_the_page_has_each_script_with_its_families() -> None:
    page = "\n".join(render_faults())
    assert all(fault.script in page and f"# {fault.shows}" in page for fault in FAULTS)
    assert {family for fault in FAULTS for family in fault.families} <= VISION.keys()
