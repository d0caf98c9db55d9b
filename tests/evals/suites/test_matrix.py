"""The cells of a suite: which there are, what they are called, and which can share an engine."""

from __future__ import annotations

from pathlib import Path

from mlxrun.config.setting_fields import hash_config
from tests.helpers.suite_files import CAPITALS, find_problems, read_cells, write_suite

FULL = """
    models:
      cold: {set: {sampling.temperature: 0}}
      warm: {config: warm.yaml, set: {model.names: [w]}}
    tasks:
      chat:
        data: cities.csv
        prompts: {short: "{{ country }}?", long: "Capital of {{ country }}?"}
        few_shot: {answer: "{{ capital }}", count: 1}
      pick:
        data: cities.csv
        prompt: "Capital of {{ country }}:"
        choices: [Paris, Lima, Tokyo]
        expected: capital
    seeds: [1, 2]
    vary:
      prompt: [short, long]
      sampling.top_p: [1, 0.5]
      few_shot.count: [1, 2]
"""


def test_every_combination_that_differs(tmp_path: Path) -> None:
    (tmp_path / "warm.yaml").write_text("sampling: {temperature: 1, top_k: 3}\n")
    _, cells, _ = read_cells(write_suite(tmp_path, FULL))
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) == 2 * (2 * 2 * 2 * 2 + 1)
    assert names[:2] == [
        "cold/chat/seed-1,prompt-short,top_p-1,count-1",
        "cold/chat/seed-2,prompt-short,top_p-1,count-1",
    ]
    assert [name for name in names if "pick" in name] == ["cold/pick/seed-1", "warm/pick/seed-1"]
    last = next(cell for cell in cells if cell.name == "warm/chat/seed-2,prompt-long,top_p-0.5,count-2")
    assert (last.config.sampling.seed, last.config.sampling.top_p, last.config.sampling.top_k) == (2, 0.5, 3)
    assert last.task.prompt == "Capital of {{ country }}?" and last.task.few_shot is not None
    assert last.task.few_shot.count == 2
    assert last.settings == {"seed": 2, "prompt": "long", "sampling.top_p": 0.5, "few_shot.count": 2}
    assert len({cell.engine_key for cell in cells}) == 2  # those of cold and warm, whose names differ
    assert len({cell.lines_key for cell in cells}) == 5
    assert len({cell.config_hash for cell in cells}) == 2 * 2 * 2 + 2  # those of pick have no top_p


def test_records_are_in_the_order_of_the_job_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    _, (cell,), _ = read_cells(write_suite(tmp_path, CAPITALS))
    assert cell.config.batch.order == "input" and cell.config_hash == hash_config(cell.config)
    text = CAPITALS.replace("{tiny: }", "{tiny: {set: {batch.order: completion}}}")
    _, (cell,), _ = read_cells(write_suite(tmp_path, text))
    assert cell.config.batch.order == "completion"


def test_without_seeds_that_of_the_config(tmp_path: Path) -> None:
    _, (cell,), _ = read_cells(write_suite(tmp_path, CAPITALS))
    assert (cell.name, cell.settings, cell.config.sampling.seed) == (
        "tiny/capitals/seed-0",
        {"seed": 0},
        None,
    )
    text = CAPITALS.replace("{tiny: }", "{tiny: {set: {sampling.seed: 7}}}")
    _, (cell,), _ = read_cells(write_suite(tmp_path, text))
    assert (cell.name, cell.config.sampling.seed) == ("tiny/capitals/seed-7", 7)


def test_models_that_need_another_engine(tmp_path: Path) -> None:
    text = CAPITALS + "    vary: {model.dtype: [float32, bfloat16], media.max_images: [1]}\n"
    _, cells, _ = read_cells(write_suite(tmp_path, text))
    assert [cell.variant for cell in cells] == [
        "seed-0,dtype-float32,max_images-1",
        "seed-0,dtype-bfloat16,max_images-1",
    ]
    assert cells[0].engine_key != cells[1].engine_key and cells[0].lines_key == cells[1].lines_key


def test_names_of_values_differ(tmp_path: Path) -> None:
    """Values whose names would be one folder, or none, have a digest instead."""
    text = CAPITALS + "    vary: {model.path: [org/a, org_/a, ORG/A, org/__a], cache.backend: [none]}\n"
    _, cells, _ = read_cells(write_suite(tmp_path, text))
    names = [cell.variant for cell in cells]
    assert len({name.casefold() for name in names}) == 4
    assert all("/" not in name and name.startswith("seed-0,path-") for name in names)
    text = CAPITALS + "    vary: {cache.memory_bytes: [1GB], media.memory_bytes: [2GB]}\n"
    _, cells, _ = read_cells(write_suite(tmp_path, text))
    assert cells[0].variant == "seed-0,cache.memory_bytes-1GB,media.memory_bytes-2GB"


def test_problems_of_configs_have_their_positions(tmp_path: Path) -> None:
    (tmp_path / "warm.yaml").write_text("sampling: {temprature: 1}\n")
    text = """
    models:
      a: {config: warm.yaml, set: {model: {pth: x}, engine.max_errors: 0}}
      b: {config: none.yaml}
    tasks: {t: {data: cities.csv, prompt: "{{ area }}"}}
    vary: {scheduler.max_running: [4, many]}
    """
    assert find_problems(write_suite(tmp_path, text)) == [
        "suite.yaml:3:15: models.b.config: none.yaml: there is no such file",
        "suite.yaml:2:40: model.pth: unknown key (did you mean 'path'?)",
        "suite.yaml:2:68: engine.max_errors: 0 is less than 1",
        "warm.yaml:1:12: sampling.temprature: unknown key (did you mean 'temperature'?)",
        "suite.yaml:5:35: scheduler.max_running: 'many' is not an integer",
    ]


def test_paths_in_a_suite_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "hello.jinja").write_text("{{ messages }}")
    text = CAPITALS.replace(
        "{tiny: }", "{tiny: {set: {model.path: ./model, model.chat_template: hello.jinja}}}"
    )
    _, (cell,), _ = read_cells(write_suite(tmp_path, text))
    assert cell.config.model.path == str(tmp_path / "model")
    assert cell.config.model.chat_template == str(tmp_path / "hello.jinja")
