"""lm-evaluation-harness' tasks, unchanged: over HTTP, in the harness' process, and with mlx-lm's own model,
whose scores are the oracle."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.jobs.scoring.measure import MeasuredLines
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE, describe_perplexities, score_perplexity
from tests.helpers import text_models
from tests.helpers.command_processes import PATIENCE
from tests.helpers.harness_scripts import run_harness_script
from tests.helpers.served_model import run_model_server

pytestmark = pytest.mark.slow
BATCHED = ("mlxrun_choice", "mlxrun_pages")
PAGES = Path(__file__).parent / "tasks/data/pages.jsonl"
LONG = "The river runs past the old mill. " * 6  # as in scripts/run_lm_eval_tasks.py
TASKS = ("choice", "letters", "truths", "gaps", "last_word", "pages", "sums", "votes")


def build_model(folder: Path) -> Path:
    """A tiny Llama whose tokenizer puts a token before each text."""
    text_models.build("llama", folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    begin = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    tokenizer.save(path)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().rstrip().removesuffix("}") + f', "bos_token": "{begin}"}}')
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What scripts/run_lm_eval_tasks.py has found."""
    folder = build_model(tmp_path_factory.mktemp("model") / "tiny")
    with run_model_server(Config(model=ModelSettings(path=str(folder)))) as served:
        given = {"url": served.url, "model": str(folder)}
        found = run_harness_script("run_lm_eval_tasks.py", given, tmp_path_factory.mktemp("lm_eval"))
        pages = [json.loads(line)["page"] for line in PAGES.read_text(encoding="utf-8").splitlines()]
        texts = {"long": (LONG, 64), "other": (LONG, 40), **{page: (page, 511) for page in pages}}
        found["windows"] = {name: ask_for_windows(served.url, *each) for name, each in texts.items()}
        return found


def ask_for_windows(url: str, text: str, size: int) -> list[float]:
    """The logprobs of a text in windows of so many tokens, from the server."""
    body = {"prompt": text, "prompt_windows": {"size": size}, "echo": True, "logprobs": 0, "max_tokens": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        (choice,) = json.load(response)["choices"]
    values: list[float] = choice["logprobs"]["token_logprobs"]
    return values


def iterate_pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """The single values of two nested lists or objects of the same shape."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        for each in zip(one, other, strict=True):
            yield from iterate_pairs(*each)
    else:
        yield one, other


def check_equal(one: Any, other: Any, margin: float = 1e-4) -> None:
    """Scores differ by at most `margin` (relative where they are large), and nothing else differs."""
    for a, b in iterate_pairs(one, other):
        if isinstance(a, float):
            assert math.isclose(a, b, rel_tol=1e-5, abs_tol=margin)
        else:
            assert a == b


def select(found: Any, names: Any) -> Any:
    return {part: {name: found[part][name] for name in names} for part in ("metrics", "samples")}


def test_every_type_of_task_has_scores(found: Any) -> None:
    metrics = found["http"]["metrics"]
    assert {name.removeprefix("mlxrun_") for name in metrics} == {*TASKS, "group"}
    assert all(metrics.values())
    for name in metrics:
        assert all(math.isfinite(value) for value in metrics[name].values()), name
    assert set(metrics["mlxrun_pages"]) == {
        "word_perplexity,none",
        "byte_perplexity,none",
        "bits_per_byte,none",
    }
    choices = found["http"]["samples"]["mlxrun_choice"]
    assert len(choices) == 6 and all(len(each) == 4 for each in choices)


def test_scores_in_the_process_are_those_over_http(found: Any) -> None:
    """Of all tasks but one whose answers are sampled; also in batches."""
    http, local = found["http"], found["local"]
    for name in local["metrics"].keys() - {"mlxrun_votes"}:
        check_equal(local["metrics"][name], http["metrics"][name])
    for name in local["samples"].keys() - {"mlxrun_votes"}:
        check_equal(local["samples"][name], http["samples"][name])
    check_equal(found["http batched"]["samples"], {name: http["samples"][name] for name in BATCHED})


@pytest.mark.parametrize(("own", "other"), [("local bos", "mlx_lm"), ("local chat", "mlx_lm chat")])
def test_scores_are_those_of_mlx_lm(found: Any, own: str, other: str) -> None:
    """To 1e-4, and the same tokens are the likeliest; answers are the same."""
    names = found[other]["metrics"].keys()
    assert "mlxrun_sums" in names
    check_equal(select(found[own], names), select(found[other], names))


def test_a_wrong_score_is_seen(found: Any) -> None:
    """The twin: without the tokenizer's first token the scores differ by more than the margin."""
    names = found["mlx_lm"]["metrics"].keys()
    with pytest.raises(AssertionError):
        check_equal(select(found["local"], names), select(found["mlx_lm"], names))


def test_answers_end_at_their_stop_strings(found: Any) -> None:
    for name in ("http", "local", "http chat", "local chat"):
        samples = found[name]["samples"]
        texts = [text for each in samples["mlxrun_sums"] for resps in each for text in resps]
        assert len(texts) == 6 and not any("\n" in text or "%" in text for text in texts)
        votes = [resps for each in samples["mlxrun_votes"] for resps in each]
        assert all(len(resps) == 3 for resps in votes)
        if name.startswith("local"):
            assert any(len(set(resps)) > 1 for resps in votes), "sampled answers to one question differ"
    assert found["local chat"]["samples"]["mlxrun_sums"] == found["http chat"]["samples"]["mlxrun_sums"]


def test_a_text_longer_than_the_context_is_scored_in_windows(found: Any) -> None:
    """Each token once, and a text of no tokens is certain."""
    scores, windows = found["long"]["scores"], found["long"]["windows"]
    assert sum(windows) == len("The river runs past the old mill. " * 6) and len(windows) == 4
    assert scores[0] < scores[2] < 0 and scores[1] == 0


def test_perplexity_is_that_of_the_harness(found: Any) -> None:
    """`prompt_windows` and `match: perplexity` give what its `loglikelihood_rolling` does, to 1e-4.

    So they do for a text of several windows, and for the figures of a task."""
    windows = dict(found["windows"])
    del windows["other"]
    assert sum(windows.pop("long")) == pytest.approx(found["long"]["scores"][0], abs=1e-4)
    lines = MeasuredLines(BITS_PER_BYTE)
    for page, values in windows.items():
        body = {"choices": [{"logprobs": {"token_logprobs": values}}]}
        verdict = score_perplexity(body, page)
        lines.add(verdict.score, verdict.sums)
    ours, theirs = describe_perplexities(lines.add_up()), found["local"]["metrics"]["mlxrun_pages"]
    assert lines.count == 3
    assert lines.value == pytest.approx(theirs["bits_per_byte,none"], abs=1e-4)
    assert ours["byte_perplexity"] == pytest.approx(theirs["byte_perplexity,none"], rel=1e-4)
    assert ours["word_perplexity"] == pytest.approx(theirs["word_perplexity,none"], rel=1e-4)


def test_windows_of_another_size_are_another_perplexity(found: Any) -> None:
    """The twin: the comparison sees which tokens come before."""
    assert found["windows"]["other"] != found["windows"]["long"]
    assert sum(found["windows"]["other"]) != pytest.approx(found["long"]["scores"][0], abs=1e-4)


def test_what_cannot_be_honoured_is_named(found: Any) -> None:
    setting, twice, option, text = found["refused"]
    assert "scheduler.max_runing" in setting and "max_running" in setting
    assert "pretrained" in twice and option.startswith("num_beams: ") and "9 tokens do not fit" in text


def test_the_command_and_what_it_tells_of_the_model(found: Any) -> None:
    assert "mlxrun_gaps" in found["command"] and "acc" in found["command"]
    assert found["info"].keys() == {"model_name", "model_digests", "mlxrun_version", "mlxrun_config"}
