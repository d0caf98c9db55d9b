"""`python -m benchmarks structured-output`: rows that decode to the end, with a schema each and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from benchmarks import structured_output
from benchmarks.__main__ import command
from mlxrun.cli.bench.engine.benchmark import SideRuns
from mlxrun.cli.bench.engine.measurement import MEASURES


def test_each_row_has_a_schema_of_its_own_that_never_ends() -> None:
    made = [structured_output.make_schema(row) for row in range(structured_output.ROWS)]
    assert len({json.dumps(schema) for schema in made}) == structured_output.ROWS
    for schema in made:
        Draft202012Validator.check_schema(schema)
        assert not Draft202012Validator(schema).is_valid([{}] * 100)


def test_the_ratio_is_the_speed_under_schemas_over_that_without() -> None:
    def runs(tps: float) -> SideRuns:
        return SideRuns([dict.fromkeys(MEASURES, 1.0) | {"decode_tps": tps}])

    work = structured_output.make_workload(1, 256, 0)
    report = structured_output.summarise(
        work, {structured_output.FREE: runs(200.0), structured_output.SCHEMAS: runs(150.0)}
    )
    assert report["ratio"] == {"decode_tps": 0.75, "output_tps": 1.0}
    assert (report["rows"], report["output_tokens"]) == (16, 16 * 256)


def test_the_tokenizer_of_a_preset_spells_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    structured_output.write_byte_tokenizer(tmp_path, 1024)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.get_vocab_size() == 1024
    assert made.decode(made.encode('{"a": [1]}\n\u00e9').ids) == '{"a": [1]}\n\u00e9'


@pytest.mark.slow
def test_both_sides_run_for_real(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    given = ["structured-output", "--scale", "0.05", "--repeat", "1", "--json", str(out)]
    done = CliRunner().invoke(command, given, standalone_mode=False)
    assert done.exception is None, done.output
    assert "a schema each" in done.output
    part = json.loads(out.read_text())["workloads"]["structured-output"]
    assert set(part["sides"]) == {"free", "schemas"}
    assert part["ratio"]["decode_tps"] > 0
