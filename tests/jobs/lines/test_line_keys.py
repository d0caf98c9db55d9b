"""What a job's stored answers depend on, and scores that the jobs in the repository must reach.

Answers of two settings must never mix in one output, and what changes no answer must not cost a run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny.byte_tokenizer import write_json
from mlxrun.config.settings import (
    Config,
    MediaSettings,
    PrefillSettings,
    SpeculationSettings,
    StructuredSettings,
)
from mlxrun.jobs.lines.job_file import CHAT, JobLine
from mlxrun.jobs.lines.line_keys import LineKeys, collect_settings, digest_settings, find_local_images
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info
from tests.helpers.command_processes import run_program
from tests.helpers.model_fixtures import Zoo

Change = Callable[[Config], Config]


def config_of(folder: Path, section: str = "model", **fields: Any) -> Config:
    config = replace(Config(), model=replace(Config().model, path=str(folder)))
    return replace(config, **{section: replace(getattr(config, section), **fields)})


def digest(config: Config, host: LoadedModelInfo | None = None) -> str:
    return digest_settings(collect_settings(config, host or load_model_info(config.model)))


@pytest.fixture
def folder(zoo: Zoo, tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(zoo.text("llama"), made)
    return made


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("model", {"chat_template_args": {"enable_thinking": False}}),
        ("model", {"context_length": 99}),
        ("model", {"dtype": "bfloat16"}),
        ("parsers", {"tools": "hermes"}),
        ("parsers", {"reasoning": "none"}),
        ("sampling", {"temperature": 0.3}),
        ("sampling", {"seed": 9}),
        ("sampling", {"max_tokens": 9}),
        ("engine", {"reproducible": True}),
        ("cache", {"stored_bits": 8}),
        ("cache", {"kv_bits": 8}),
    ],
)
def test_settings_that_change_answers(folder: Path, section: str, fields: dict[str, Any]) -> None:
    """Another value of each is another key, so a job is run again."""
    assert digest(config_of(folder, section, **fields)) != digest(config_of(folder))


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("scheduler", {"max_running": 3, "policy": "fair", "chunk": 64, "prefill_budget": 64}),
        ("cache", {"backend": "none"}),
        ("batch", {"concurrency": 5, "order": "input", "retries": 9}),
        ("server", {"port": 1234}),
        ("log", {"level": "debug"}),
    ],
)
def test_settings_that_change_no_answer(folder: Path, section: str, fields: dict[str, Any]) -> None:
    """How fast, in which order and where: nothing is run again for that."""
    assert digest(config_of(folder, section, **fields)) == digest(config_of(folder))


@pytest.mark.parametrize("fields", [{"max_running": 3}, {"chunk": 64}, {"prefill_budget": 100}])
def test_reproducible_rows_depend_on_widths_and_chunks(folder: Path, fields: dict[str, int]) -> None:
    """On a GPU a row rounds as in steps of `max_running` rows."""
    config = config_of(folder, "engine", reproducible=True)
    other = replace(config, scheduler=replace(config.scheduler, **fields))
    assert digest(other) != digest(config)


def test_the_models_files_are_part_of_it(folder: Path) -> None:
    """Its weights, config, template, tokenizer, ends of answers and recommended sampling."""
    config = config_of(folder)
    seen = [digest(config)]

    def changed(name: str, edit: Callable[[Path], None]) -> None:
        edit(folder / name)
        seen.append(digest(config))
        assert len(set(seen)) == len(seen), name

    changed("generation_config.json", lambda p: write_json(p, {"eos_token_id": 65}))
    changed("generation_config.json", lambda p: write_json(p, {"eos_token_id": 65, "temperature": 0.5}))
    changed("chat_template.jinja", lambda p: p.write_text(p.read_text() + " "))
    changed("config.json", lambda p: write_json(p, {**json.loads(p.read_text()), "rope_theta": 5000.0}))
    changed("tokenizer_config.json", lambda p: write_json(p, {**json.loads(p.read_text()), "more": 1}))
    changed("model.safetensors", _flip)
    assert digest(config) == seen[-1]


def test_a_draft_model_is_part_of_it_where_it_chooses_tokens(folder: Path, zoo: Zoo) -> None:
    """What it drafts is verified, and changes no answer."""
    config = config_of(folder, draft=str(zoo.text("gemma3_text")))
    drafting = replace(config, speculation=SpeculationSettings("draft"))
    assert digest(drafting) == digest(config_of(folder))
    sparse = [
        replace(each, prefill=PrefillSettings("draft"))
        for each in (config, config_of(folder, draft=str(zoo.text("llama"))))
    ]
    assert len({digest(each) for each in sparse}) == 2


def test_how_images_become_pixels_is_part_of_it(zoo: Zoo, tmp_path: Path) -> None:
    """Answers to images of another size are other answers. A text model's are not touched."""
    made = tmp_path / "vision"
    shutil.copytree(zoo.vision("qwen3_vl"), made)
    sees, blind = config_of(made), config_of(made, kind="text")
    before = digest(sees), digest(blind)
    path = made / "preprocessor_config.json"
    write_json(path, {**json.loads(path.read_text()), "max_pixels": 12_345})
    assert digest(sees) != before[0]
    assert digest(blind) == before[1]
    finer = [replace(config, media=MediaSettings(pdf_dpi=200)) for config in (sees, blind)]
    assert digest(finer[0]) != digest(sees) and digest(finer[1]) == digest(blind)


def test_pdfs_that_a_line_names(tmp_path: Path) -> None:
    """Their contents are part of the key, as those of images are."""
    file = {"type": "file", "file": {"file_data": "a.pdf"}}
    bodies = [
        {"messages": [{"role": "user", "content": [file]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "a.pdf"}]}]},
        {"input": [{"output": [{"type": "input_file", "file_data": "a.pdf"}]}]},
    ]
    assert [list(find_local_images(body)) for body in bodies] == [["a.pdf"]] * 3
    for data in ("data:,", "JVBERi0xLjQ="):
        assert list(find_local_images({"messages": [{"content": [{"file": {"file_data": data}}]}]})) == []
    line = JobLine(0, "a", CHAT, bodies[0])
    found = set()
    for content in (b"1", b"2"):
        (tmp_path / "a.pdf").write_bytes(content)
        found.add(LineKeys("s", tmp_path, 100).compute_key(line))
    assert len(found) == 2


def test_closed_objects_are_part_of_it(folder: Path) -> None:
    """They change what an answer may be; without them keys are as they were."""
    config = config_of(folder)
    closed = replace(config, structured=StructuredSettings(close_objects=True))
    assert digest(closed) != digest(config) == digest(replace(config, structured=StructuredSettings()))


def test_a_reason_may_quote_half_a_character(tmp_path: Path) -> None:
    """As JSON may hold one, in a damaged document of a batch."""
    keys = LineKeys("s", tmp_path, 100)
    assert keys.compute_bad_key(b"{}", "not \ud800") != keys.compute_bad_key(b"{}", "not \ud801")


def test_code_that_runs_is_part_of_it(folder: Path) -> None:
    """Python beside the weights, where it is allowed to run; else nothing is run again for it."""
    trusted, plain = config_of(folder, trust_remote_code=True), config_of(folder)
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), "n": 1})
    before = digest(trusted), digest(plain)
    (folder / "code").mkdir()
    for path in (folder / "model.py", folder / "code" / "layers.py"):
        path.write_text("x = 1\n")
        after = digest(trusted)
        assert after != before[0]
        path.write_text("x = 2\n")
        assert digest(trusted) not in (after, before[0])
        path.unlink()
        assert digest(trusted) == before[0]
    (folder / "model.py").write_text("x = 1\n")
    assert digest(plain) == before[1]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# -- the jobs of the repository ---------------------------------------------------------------------------


def shares(table: str) -> dict[str, float]:
    """The share of right answers of each group, from the table that `mlxrun batch` prints."""
    head, *rows = [line.split() for line in table.splitlines() if line.strip()]
    assert head == ["group", "lines", "correct", "score", "[95", "%]", "failed"]
    return {row[0]: float(row[3]) / 100 for row in rows if row[4:5] == ["%"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "least", "lines", "limit"), [("eval", 0.9, 200, 36), ("vision", 0.85, 60, 50)]
)
def test_the_jobs_reach_their_scores(tmp_path: Path, job: str, least: float, lines: int, limit: int) -> None:
    """Every text skill 90 %, every vision skill 85 %, exit 0: what `make demo` shows. Of each job the
    first lines do, as the skills take turns in it."""
    path, out = Path(__file__).parents[3] / "jobs" / f"{job}.jsonl", tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "mlxrun", "batch", str(path), "-o", str(out)]
    command += ["--limit", str(limit)]
    ran = run_program(command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    wanted = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(wanted) >= lines and len(out.read_text().splitlines()) == min(len(wanted), limit)
    found = shares(ran.stdout)
    assert found.keys() == {line["eval"]["group"] for line in wanted} | {"total"}
    assert min(found.values()) >= least, found


def test_a_low_score_is_read() -> None:
    """The twin: the table's own numbers."""
    table = "group   lines  correct         score [95 %]  failed\nadd  10  7  70.0 % [39.7, 89.2]  1\n"
    assert shares(table) == {"add": 0.7}
