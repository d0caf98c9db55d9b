"""A suite on a fake engine: one load for all cells of a model, states, resuming, and what changes do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import open_runs
from mlxrun.jobs.records.run_paths import lock_folder
from mlxrun.jobs.run.stop_signals import Interrupted
from tests.helpers.batch_fakes import by_id, read
from tests.helpers.raw_clients import until
from tests.helpers.suite_bench import SuiteBench
from tests.helpers.suite_files import write_suite

SUITE = """
    models:
      a: {set: {model.path: org/one}}
      b: {set: {model.path: org/two}}
      c: {set: {model.path: org/one, sampling.temperature: 0}}
    tasks:
      capitals:
        data: cities.csv
        prompt: "Capital of {{ country }}, {{ capital }}?"
        expected: capital
        match: contains
        group: area
      countries:
        data: cities.csv
        prompt: "{{ country }}"
        expected: country
        match: contains
    seeds: [2]
"""


@pytest.fixture
def bench(tmp_path: Path) -> SuiteBench:
    return SuiteBench(write_suite(tmp_path, SUITE))


async def test_each_model_is_loaded_once(bench: SuiteBench) -> None:
    """Models that differ in sampling only share an engine, wherever they stand in the suite."""
    assert await bench.run() == 0
    assert bench.loads == {"one": 1, "two": 1} and all(client.closed for client in bench.clients)
    assert [client.output > 0 for client in bench.clients] == [True, True]
    found = bench.read()
    assert found["state"] == "done" and len(found["cells"]) == 6
    assert set(bench.get_states().values()) == {"done"}
    cell = found["cells"][0]
    assert (cell["name"], cell["lines"], cell["done"], cell["failed"]) == ("a/capitals/seed-2", 3, 3, 0)
    assert cell["scores"]["groups"].keys() == {"EU", "Asia", "America"}
    assert cell["scores"]["total"]["correct"] == 3 and cell["error"] is None and cell["seconds"] >= 0
    assert found["runs"][0]["loads"] == {"a": 1, "b": 1, "c": 1} and found["runs"][0]["exit"] == 0
    assert bench.titles[:2] == ["a/capitals/seed-2", "a/countries/seed-2"]
    assert "a/capitals/seed-2: 3 of 3 lines done, 100.0 % [43.9, 100.0]" in bench.said
    out = bench.folder / "a/capitals/seed-2/job.out.jsonl"
    assert by_id(out).keys() == {"row-1", "row-2", "row-3"}
    manifest = json.loads((bench.folder / "c/countries/seed-2/job.out.jsonl.run/manifest.json").read_text())
    assert manifest["seeds"]["base"] == 2 and manifest["config"]["sampling"]["temperature"] == 0
    assert manifest["config_hash"] == found["cells"][5]["config_hash"]


async def test_the_cache_is_deleted_once_no_engine_writes_to_it(
    bench: SuiteBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    delete = "mlxrun.evals.suites.suite_run.delete_cache"
    monkeypatch.setattr(delete, lambda folder: closed.append(bench.clients[-1].closed))
    assert await bench.run() == 0
    assert closed == [True, True]


async def test_a_second_load_would_be_seen(bench: SuiteBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: an engine that is started for each cell."""
    monkeypatch.setattr("mlxrun.evals.suites.suite_run.SharedEngine.start", lambda self, begin: begin())
    await bench.run("a")
    assert bench.loads == {"one": 2} and bench.read()["runs"][0]["loads"] == {"a": 2}


async def test_loading_is_not_a_cells_time(bench: SuiteBench) -> None:
    """The speed of a model is estimated from the time of its cells."""
    bench.load_takes = 1000.0
    assert await bench.run("a") == 0
    assert all(cell["seconds"] < 1000 for cell in bench.read()["cells"][:2])


async def test_seeds_change_answers(bench: SuiteBench) -> None:
    bench.path.write_text(bench.path.read_text().replace("seeds: [2]", "seeds: [1, 2]"))
    await bench.run("b/countries")
    await bench.run("a/countries")
    one, two = (bench.folder / f"a/countries/seed-{seed}/job.out.jsonl" for seed in (1, 2))
    assert [len(by_id(path)) for path in (one, two)] == [3, 3] and by_id(one) != by_id(two)
    other = bench.folder / "b/countries/seed-1/job.out.jsonl"
    assert [each["id"] for each in read(one)] != [each["id"] for each in read(other)]


async def test_a_second_start_loads_nothing(bench: SuiteBench) -> None:
    await bench.run()
    answers = {path: path.read_bytes() for path in bench.folder.rglob("job.out.jsonl")}
    assert len(answers) == 6 and await bench.run() == 0
    assert not bench.loads and {path: path.read_bytes() for path in answers} == answers
    assert [run["loads"] for run in bench.read()["runs"]] == [{"a": 1, "b": 1, "c": 1}, {}]


@pytest.mark.parametrize("kind", ["broken", "unreadable"])
async def test_a_model_that_cannot_be_loaded_fails_its_cells_alone(bench: SuiteBench, kind: str) -> None:
    """It is tried once in a start, however many cells it has, and again in the next."""
    getattr(bench, kind).add("one")
    assert await bench.run() == 3
    states = bench.get_states()
    assert {name[0] for name, state in states.items() if state == "failed"} == {"a", "c"}
    assert {name[0] for name, state in states.items() if state == "done"} == {"b"}
    assert bench.loads == ({"one": 1, "two": 1} if kind == "broken" else {"two": 1})
    found = bench.read()
    assert found["state"] == "failed" and found["runs"][0]["exit"] == 3
    reason = "one: the weights are damaged" if kind == "broken" else "there is no tokenizer.json"
    assert found["cells"][0]["error"] == reason
    getattr(bench, kind).clear()
    assert await bench.run() == 0
    assert bench.loads == {"one": 1} and set(bench.get_states().values()) == {"done"}
    assert bench.read()["cells"][0]["error"] is None


async def test_an_engine_that_dies_fails_the_cells_that_are_left(bench: SuiteBench) -> None:
    bench.path.write_text(bench.path.read_text().replace("Capital of", "DEAD"))
    assert await bench.run() == 3
    states = bench.get_states()
    assert states["a/capitals/seed-2"] == "failed" and states["a/countries/seed-2"] == "done"
    assert bench.loads == {"one": 1, "two": 1}  # the fake dies for those requests alone


async def test_a_limit_and_some_cells(bench: SuiteBench) -> None:
    assert await bench.run("b/capitals", limit=2) == 0
    states = bench.get_states()
    assert states.pop("b/capitals/seed-2") == "limited"
    assert set(states.values()) == {"todo"} and len(states) == 5
    found = {each["name"]: each for each in bench.read()["cells"]}
    assert (found["b/capitals/seed-2"]["done"], found["b/capitals/seed-2"]["lines"]) == (2, 3)
    assert not (bench.folder / "a").exists()
    assert await bench.run("b") == 0
    assert [state for name, state in bench.get_states().items() if name[0] == "b"] == ["done"] * 2
    assert bench.clients[0].tries["Capital of France, Paris?"] == 0


async def test_a_limit_takes_nothing_from_a_finished_cell(tmp_path: Path) -> None:
    """It is done, with the scores of all lines and of its judge. They were said to be of the first lines, and
    the judge's were gone."""
    bench = SuiteBench(write_suite(tmp_path, JUDGED))
    assert await bench.run() == 0
    (cell,) = bench.read()["cells"]
    assert await bench.run(limit=2) == 0
    assert bench.read()["cells"] == [cell | {"seconds": bench.read()["cells"][0]["seconds"]}]
    assert cell["state"] == "done" and cell["scores"]["total"]["unscored"] == 0
    assert any(text.startswith("a/judged/seed-0: 3 of 3 lines done, ") for text in bench.said)


async def test_fewer_lines_than_before_are_no_limit(bench: SuiteBench) -> None:
    assert await bench.run("b/capitals", limit=2) == await bench.run("b/capitals", limit=1) == 0
    found = {each["name"]: each for each in bench.read()["cells"]}["b/capitals/seed-2"]
    assert (found["state"], found["done"], found["scores"]["total"]["lines"]) == ("limited", 2, 2)
    assert any(text.startswith("b/capitals/seed-2: 2 of 3 lines done, ") for text in bench.said)


async def test_failed_lines(bench: SuiteBench) -> None:
    bench.path.write_text(bench.path.read_text().replace("Capital of", "LONG"))
    assert await bench.run("a/capitals") == 1
    assert bench.read()["cells"][0]["failed"] == 3 and bench.get_states()["a/capitals/seed-2"] == "done"
    assert "a/capitals/seed-2: 0 of 3 lines done, 3 failed, not scored" in bench.said
    assert await bench.run("a/capitals") == 1 and not bench.loads
    assert await bench.run("a/capitals", retry_failed=True) == 1 and bench.loads == {"one": 1}


async def test_lines_that_change_run_again(bench: SuiteBench) -> None:
    """Cells whose lines are the same stay; of the others, only changed lines run."""
    await bench.run()
    cities = bench.path.with_name("cities.csv")
    cities.write_text(cities.read_text().replace("Lima", "Cusco"))
    assert await bench.run() == 0
    tried = {text for client in bench.clients for text in client.tries}
    assert tried == {"Capital of Peru, Cusco?"} and bench.loads == {"one": 1, "two": 1}
    assert sum("will run again because the job or the model changed" in text for text in bench.said) == 3


async def test_other_settings_are_refused(bench: SuiteBench) -> None:
    """Only the cells that they concern; --fresh starts these over."""
    await bench.run()
    text = bench.path.read_text()
    bench.path.write_text(text.replace("sampling.temperature: 0", "sampling.temperature: 0.5"))
    assert await bench.run() == 2
    refused = [name for name, state in bench.get_states().items() if state == "failed"]
    assert len(refused) == 2 and {name[0] for name in refused} == {"c"}
    assert "sampling.temperature is 0.5, was 0" in bench.read()["cells"][4]["error"]
    assert await bench.run("c", fresh=True) == 0 and set(bench.get_states().values()) == {"done"}
    assert list((bench.folder / "c/capitals/seed-2/job.out.jsonl.run/earlier").iterdir())


async def test_a_refused_start_leaves_the_counts_of_finished_lines(bench: SuiteBench) -> None:
    """`--dry-run` counts the answers that are there as done for their own settings, not for the refused."""
    await bench.run()
    text, known = bench.path.read_text(), bench.read()["cells"][4]
    bench.path.write_text(text.replace("sampling.temperature: 0", "sampling.temperature: 0.5"))
    assert await bench.run() == 2
    refused = bench.read()["cells"][4]
    facts = "config_hash", "job_sha256", "done", "failed"
    assert refused["state"] == "failed" and known["done"] == 3
    assert [refused[name] for name in facts] == [known[name] for name in facts]
    assert await bench.run("c", fresh=True) == 0
    assert bench.read()["cells"][4]["config_hash"] != known["config_hash"]


async def test_cells_that_left_the_suite_are_not_listed(bench: SuiteBench) -> None:
    await bench.run()
    bench.path.write_text(bench.path.read_text().replace("seeds: [2]", "seeds: [3]"))
    assert await bench.run() == 0
    names = bench.get_states().keys()
    assert len(names) == 6 and "a/capitals/seed-2" not in names
    assert (bench.folder / "a/capitals/seed-2/job.out.jsonl").exists()
    assert bench.loads == {"one": 1, "two": 1}


async def test_a_signal_between_two_lines(bench: SuiteBench) -> None:
    bench.pause = 0.05
    task = asyncio.create_task(bench.run())
    await until(lambda: task.done() or (bench.clients and bench.clients[0].busy))
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted):
        await task
    found = bench.read()
    assert found["state"] == "interrupted" and found["runs"][0]["exit"] == 130
    assert [each["state"] for each in found["cells"][:2]] == ["interrupted", "todo"]
    assert bench.clients[0].closed
    bench.pause = 0.0
    assert await bench.run() == 0 and set(bench.get_states().values()) == {"done"}


@pytest.mark.parametrize("harm", [lambda text: '{"a":', lambda text: text.replace('"counts"', '"numbers"')])
async def test_a_damaged_manifest_of_a_cell_is_written_anew(
    bench: SuiteBench, harm: Callable[[str], str]
) -> None:
    """As the error of those who read it says. The answers stay."""
    await bench.run()
    manifest = bench.folder / "b/capitals/seed-2/job.out.jsonl.run/manifest.json"
    manifest.write_text(harm(manifest.read_text()))
    says = "manifest.json: .*; `mlxrun eval` of the suite writes it anew, and keeps the answers$"
    for path in (bench.folder, bench.path, bench.folder / "b/capitals/seed-2"):
        with pytest.raises(JobError, match=says):
            open_runs(path)
    assert await bench.run() == 0 and not bench.loads
    assert [run.state for run in open_runs(bench.folder)] == ["done"] * 6
    manifest.write_text(manifest.read_text().replace('\n "format": ', '\n "format": 99'))
    with pytest.raises(JobError, match="use the version that wrote it$"):
        open_runs(bench.folder)


async def test_one_process_at_a_time(bench: SuiteBench) -> None:
    bench.folder.mkdir()
    with lock_folder(bench.folder), pytest.raises(JobError, match="another mlxrun"):
        await bench.run()


JUDGED = """
    models: {a: }
    tasks:
      judged:
        data: cities.csv
        prompt: "{{ country }}"
        group: area
        judge:
          prompt: "{{ answer[:3] }}:"
          verdict: {choices: {Fra: 1, Jap: 0.5, Per: 0}}
"""


async def test_a_judge(tmp_path: Path) -> None:
    """Its answers, here an echo, are the scores; a second start judges nothing again."""
    bench = SuiteBench(write_suite(tmp_path, JUDGED))
    assert await bench.run(limit=2) == 0
    (cell,) = bench.read()["cells"]
    assert cell["state"] == "limited" and bench.clients[0].tries["Jap:"] == 0
    assert await bench.run() == 0
    (cell,) = bench.read()["cells"]
    shares = {name: group["share"] for name, group in cell["scores"]["groups"].items()}
    assert cell["state"] == "done" and shares == {"EU": 1.0, "Asia": 0.5, "America": 0.0}
    assert bench.loads == {"embedded": 1} and bench.clients[0].tries["Jap:"] == 1
    records = read(bench.folder / "a/judged/seed-0/job.out.jsonl")
    assert sorted(record["eval"]["score"] for record in records) == [0, 0.5, 1]
    assert await bench.run() == 0 and not bench.loads
    assert bench.read()["cells"][0]["scores"] == cell["scores"]


async def test_multiple_choice(tmp_path: Path) -> None:
    text = """
    models: {a: }
    tasks:
      pick:
        data: cities.csv
        prompt: "Capital of {{ country }}:"
        choices: [Paris, Tokyo, Lima]
        expected: capital
        group: area
    """
    bench = SuiteBench(write_suite(tmp_path, text))
    assert await bench.run() == 0
    (cell,) = bench.read()["cells"]
    assert cell["name"] == "a/pick/seed-0" and cell["scores"]["total"]["lines"] == 3
    records = read(bench.folder / "a/pick/seed-0/job.out.jsonl")
    assert all(record["eval"]["match"] == "likeliest" for record in records)


async def test_cells_that_are_left_out_say_that_their_data_changed(bench: SuiteBench) -> None:
    """Until they run again, or the data is again what it was."""
    await bench.run()
    assert set(bench.get_states().values()) == {"done"}
    cities = bench.path.with_name("cities.csv")
    before = cities.read_text()
    cities.write_text(before.replace("Lima", "Cusco"))
    assert await bench.run("a/capitals") == 0
    states = bench.get_states()
    assert states["a/capitals/seed-2"] == "done" and states["b/capitals/seed-2"] == "changed"
    cities.write_text(before)
    assert await bench.run("a/capitals") == 0
    assert set(bench.get_states().values()) == {"done"}
    cities.write_text(before.replace("Lima", "Cusco"))
    assert await bench.run("a/capitals") == 0
    assert await bench.run() == 0 and set(bench.get_states().values()) == {"done"}


async def test_cells_that_an_interrupted_start_has_not_reached_say_that_their_data_changed(
    bench: SuiteBench,
) -> None:
    """Also beside later starts of other cells: their scores are of earlier data."""
    await bench.run()
    cities = bench.path.with_name("cities.csv")
    before = cities.read_text()
    cities.write_text(before.replace("Lima", "Cusco"))
    bench.pause = 0.05
    task = asyncio.create_task(bench.run())
    await until(lambda: task.done() or (bench.clients and bench.clients[0].busy))
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted):
        await task
    states = bench.get_states()
    assert states["a/capitals/seed-2"] == "interrupted" and states["b/capitals/seed-2"] == "changed"
    bench.pause = 0.0
    assert await bench.run("a/capitals") == 0
    states = bench.get_states()
    assert states["a/capitals/seed-2"] == "done" and states["b/capitals/seed-2"] == "changed"
    assert await bench.run() == 0 and set(bench.get_states().values()) == {"done"}


UNSCORED = """
    models:
      a: {set: {model.path: org/one}}
      b: {set: {model.path: org/two}}
    tasks:
      own:
        data: cities.csv
        prompt: "{{ country }}"
"""
SCORED = """
        expected: country
        eval: {scorer: "own.py:score"}
"""
WITH_JUDGE = """
        judge: judge.json
"""


@pytest.mark.parametrize(
    ("scoring", "name", "contents"),
    [
        (SCORED, "own.py", ["def score(answer): return 1", "def score(answer): return 0"]),
        (
            WITH_JUDGE,
            "judge.json",
            [
                json.dumps(
                    {"prompt": "{{ answer[:3] }}:", "verdict": {"choices": {"Fra": score, "Jap": 0.5}}}
                )
                for score in (0, 1)
            ],
        ),
    ],
    ids=["scorer", "judge"],
)
async def test_cells_say_that_their_scorer_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scoring: str, name: str, contents: list[str]
) -> None:
    """Until they run again: the scores of an edited scorer stood beside those of the one before."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(contents[0])
    bench = SuiteBench(write_suite(tmp_path, UNSCORED + scoring))
    assert await bench.run() == 0 and await bench.run("a") == 0
    assert set(bench.get_states().values()) == {"done"}
    (tmp_path / name).write_text(contents[1])
    assert await bench.run("a") == 0
    assert bench.get_states() == {"a/own/seed-0": "done", "b/own/seed-0": "changed"}
    assert await bench.run() == 0 and set(bench.get_states().values()) == {"done"}


async def test_cells_that_are_left_out_say_that_their_settings_changed(bench: SuiteBench) -> None:
    """Until those are again what they were. suite.json has the present settings beside their scores. A place
    in the engine's queue is none that changes answers."""
    await bench.run()
    text = bench.path.read_text()
    for setting, state in (
        ("sampling.temperature: 0.5", "changed"),
        ("sampling.temperature: 0, scheduler.max_queue: 7", "done"),
    ):
        bench.path.write_text(text.replace("sampling.temperature: 0", setting))
        assert bench.path.read_text() != text
        assert await bench.run("a") == 0
        states = bench.get_states()
        assert states["c/capitals/seed-2"] == states["c/countries/seed-2"] == state
        assert states["b/capitals/seed-2"] == "done"
    bench.path.write_text(text)
    assert await bench.run("a") == 0 and set(bench.get_states().values()) == {"done"}


async def test_a_cell_of_a_killed_start_runs_no_more(bench: SuiteBench) -> None:
    """Also if a later start leaves it out."""
    await bench.run()
    found = bench.read()
    found["cells"][0]["state"] = "running"
    (bench.folder / "suite.json").write_text(json.dumps(found))
    assert await bench.run("b") == 0
    assert list(bench.get_states().values()) == ["interrupted", *["done"] * (len(found["cells"]) - 1)]


def set_temperature(bench: SuiteBench, new: float, old: float = 0) -> None:
    text = bench.path.read_text()
    bench.path.write_text(text.replace(f"sampling.temperature: {old}", f"sampling.temperature: {new}"))


async def test_a_refused_cell_that_is_left_out_is_judged_by_the_present_settings(bench: SuiteBench) -> None:
    """It stays failed with the refused ones, is done with those of its answers, or changed with other
    data."""
    await bench.run()
    known = bench.read()["cells"]
    set_temperature(bench, 0.5)
    cities = bench.path.with_name("cities.csv")
    before = cities.read_text()
    cities.write_text(before.replace("Lima", "Cusco"))
    assert await bench.run("c") == 2
    assert await bench.run("a/countries") == 0
    states = bench.get_states()
    assert states["c/capitals/seed-2"] == states["c/countries/seed-2"] == "failed"
    set_temperature(bench, 0, 0.5)
    assert await bench.run("a/countries") == 0
    states = bench.get_states()
    assert states["c/capitals/seed-2"] == "changed" and states["c/countries/seed-2"] == "done"
    cities.write_text(before)
    assert await bench.run("a/countries") == 0
    found = bench.read()["cells"]
    assert found[4:] == known[4:] and {each["state"] for each in found} == {"done"}


async def test_an_unfinished_refused_cell_that_is_left_out(bench: SuiteBench) -> None:
    """With the settings of its answers again, it is as far as it was."""
    assert await bench.run("c/capitals", limit=2) == 0
    bench.pause = 0.05
    task = asyncio.create_task(bench.run("c/countries"))
    await until(lambda: task.done() or (bench.clients and bench.clients[0].busy))
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(Interrupted):
        await task
    set_temperature(bench, 0.5)
    assert await bench.run("c/capitals") == 2
    set_temperature(bench, 0, 0.5)
    assert await bench.run("b") == 0
    states = bench.get_states()
    assert (states["c/capitals/seed-2"], states["c/countries/seed-2"]) == ("limited", "interrupted")


async def test_a_cell_that_failed_by_itself_stays_failed(bench: SuiteBench) -> None:
    """While the suite is as it was. A model that could not be read is to do with another config."""
    text = bench.path.read_text()
    bench.path.write_text(text.replace("Capital of", "DEAD"))
    bench.unreadable.add("two")
    assert await bench.run("a/capitals") == 3 and await bench.run("b/countries") == 3
    assert await bench.run("a/countries") == 0
    states = bench.get_states()
    assert states["a/capitals/seed-2"] == states["b/countries/seed-2"] == "failed"
    bench.path.write_text(bench.path.read_text().replace("org/two", "org/three"))
    assert await bench.run("a/countries") == 0
    states = bench.get_states()
    assert (states["a/capitals/seed-2"], states["b/countries/seed-2"]) == ("failed", "todo")


async def test_a_cell_whose_judge_failed_stays_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its answers are complete: their scores are missing, or those of an earlier judge."""
    other = "      other: {data: cities.csv, prompt: '{{ area }}'}\n"
    bench = SuiteBench(write_suite(tmp_path, JUDGED + other))

    async def fail(*arguments: object) -> None:
        raise JobError("no verdict")

    async def check_failure() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("mlxrun.evals.suites.suite_run.run_judge", fail)
            assert await bench.run("a/judged") == 2
        assert await bench.run("a/other") == 0
        assert bench.get_states()["a/judged/seed-0"] == "failed"

    await check_failure()
    assert await bench.run("a/judged") == 0
    text = bench.path.read_text()
    bench.path.write_text(text.replace("{a: }", "{a: {set: {sampling.temperature: 0.5}}}"))
    assert await bench.run("a/judged") == 2
    bench.path.write_text(text)
    assert await bench.run("a/other") == 0 and bench.get_states()["a/judged/seed-0"] == "done"
    bench.path.write_text(text.replace("[:3] }}:", "[:3] }}!"))
    await check_failure()
