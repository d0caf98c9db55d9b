"""`mlxrun bench serve` and `mlxrun bench model` as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--url", "ftp://h/v1"], "expected http"),
        (["--url", "http:///v1"], "expected http"),
        (["--url", "a=http://h/v1", "--url", "a=http://i/v1"], "two servers"),
        (["--url", "http://h/v1", "--key-env", "NO_SUCH_VARIABLE"], "no such environment variable"),
        (["--url", "http://h/v1", "--workload", "long", "--rate", "5"], "--rate is for the workloads chat,"),
        (
            ["--url", "http://h/v1", "--long-words", "5"],
            "--long-words is for the workloads long, interactive only",
        ),
        (["--url", "http://h/v1", "--pages", "5"], "--pages is for the workloads interactive only"),
        ([], "--url"),
    ],
)
def test_bad_flags_say_what_is_wrong(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert match in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["127.0.0.1:1", "a=127.0.0.1:1", "http://127.0.0.1:1/", "http://127.0.0.1:1/v1/"]
)
def test_a_server_that_does_not_run_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", url]) == 3
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1/v1 does not answer: " in said and "--model" not in said


def test_a_model_for_every_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It loads through mlx-lm, has the built-in model's template, and never ends an answer by itself."""
    folder = tmp_path / "model"
    assert main(["bench", "model", str(folder)]) == 0
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(folder))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    answers = list(stream_generate(model, tokenizer, prompt, max_tokens=200))
    assert len(answers) == 200 and answers[-1].finish_reason == "length"
    assert len({answer.token for answer in answers}) > 20
    assert main(["bench", "model", str(folder)]) == 2
    assert "not empty" in capsys.readouterr().err
