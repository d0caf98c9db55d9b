"""Bytes of finished answers that change on disk between two runs: every line with one runs again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.batch_fakes import by_id, finish_job

NOTICED = (
    "1 line will run again because the output was edited or damaged",
    "the output had 1 line that this job did not write or that were damaged",
    "1 line will run again because finished records are missing",
    "lines will run again because finished records are missing",
)


@pytest.mark.slow
async def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """One bit anywhere in the output or the errors: the line is computed again, and the files end as they
    were."""
    bench = await finish_job(tmp_path)
    out, errors = by_id(bench.paths.out), sorted(bench.paths.errors.read_bytes().splitlines())
    rng = random.Random(7)
    for number in range(30):
        path = bench.paths.errors if number % 6 == 5 else bench.paths.out
        data = bytearray(path.read_bytes())
        at, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        data[at] ^= bit
        path.write_bytes(data)
        await bench.run()
        context = f"{path.name}: bit {bit} of byte {at}: {bench.said}"
        assert by_id(bench.paths.out) == out, context
        assert sorted(bench.paths.errors.read_bytes().splitlines()) == errors, context
        assert any(words in text for words in NOTICED for text in bench.said), context
