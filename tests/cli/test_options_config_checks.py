"""What every command finds in a config before it loads anything: names of parsers, the template's syntax."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.cli.main import main

COMMANDS = (["serve"], ["batch", "job.jsonl"], ["doctor"])


@pytest.fixture(autouse=True)
def _nothing_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model, or starts a server, fails with exit 3."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlxrun.model.load.model_info.load_model_info", load)
    monkeypatch.setattr("mlxrun.cli.commands.serve.serve_until_signal", load)
    Path("job.jsonl").write_text('{"id": "a", "prompt": "x"}\n')


@pytest.mark.parametrize("command", [*COMMANDS, ["config", "check"]], ids=" ".join)
def test_unknown_parsers(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Both are reported, with key and position; exit code 2."""
    Path("c.yaml").write_text("parsers:\n  tools: qwn3\n  reasoning: thnk\n")
    assert main([*command, "-c", "c.yaml"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "mlxrun: c.yaml:2:10: parsers.tools: 'qwn3' is not the name of a tool parser (did you mean 'qwen3'"
    )
    assert second.startswith("mlxrun: c.yaml:3:14: parsers.reasoning: 'thnk' is not the name of a reasoning")


@pytest.mark.parametrize("command", [*COMMANDS, ["config", "check"]], ids=" ".join)
def test_other_mistakes_hide_none(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Parsers and templates are checked even if there are other errors; nothing is reported twice."""
    Path("t.jinja").write_text("{% endfr %}")
    Path("c.yaml").write_text(
        "parsers:\n  tools: hermess\n  reasoning: 3\n"
        "scheduler:\n  polcy: fair\n"
        "model:\n  chat_template: t.jinja\n"
    )
    assert main([*command, "-c", "c.yaml", "--set", "model.adapter=nowhere"]) == 2
    lines = capsys.readouterr().err.splitlines()
    said = (
        "c.yaml:2:10: parsers.tools: 'hermess' is not the name of a tool parser (did you mean 'hermes'",
        "c.yaml:3:14: parsers.reasoning: 3 is not a string",
        "c.yaml:5:3: scheduler.polcy: unknown key (did you mean 'policy'?)",
        "c.yaml:7:18: model.chat_template: ",
        "--set model.adapter: ",
    )
    assert len(lines) == len(said)
    assert all(line.startswith(f"mlxrun: {start}") for line, start in zip(lines, said, strict=True)), lines


@pytest.mark.parametrize("name", ["auto", "none", "hermes", "qwen3"])
def test_known_parsers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Aliases are accepted too."""
    assert main(["config", "check", "--set", f"parsers.tools={name}"]) == 0
    assert capsys.readouterr() == ("built-in defaults: ok\n", "")


@pytest.mark.parametrize("command", [*COMMANDS, ["config", "check"]], ids=" ".join)
@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for m in messages %}\nx\n{% endfr %}", "3: Encountered unknown tag 'endfr'"),
        ("{{ messages[0] }", "1: unexpected '}'"),
        ("a\n{{ 1 | nothing }}", "2: No filter named 'nothing'"),
    ],
)
def test_a_broken_template(
    command: list[str], template: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, with the file and line of the template."""
    Path("t.jinja").write_text(template)
    Path("c.yaml").write_text("model:\n  chat_template: t.jinja\n")
    assert main([*command, "-c", "c.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mlxrun: c.yaml:2:18: model.chat_template: ") and f"t.jinja:{found}" in err


def test_a_template_that_is_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.jinja").write_bytes(b"a\xff")
    assert main(["config", "check", "--set", "model.chat_template=t.jinja"]) == 2
    assert "t.jinja: it is not UTF-8 text" in capsys.readouterr().err


def test_a_good_template(capsys: pytest.CaptureFixture[str]) -> None:
    """With what transformers adds to Jinja."""
    Path("t.jinja").write_text(
        "{% for m in messages %}{% if m.x %}{% break %}{% endif %}{% generation %}{{ m | tojson }}"
        "{% endgeneration %}{% endfor %}{{ raise_exception('x') }}{{ strftime_now('%Y') }}"
    )
    assert main(["config", "check", "--set", "model.chat_template=t.jinja"]) == 0
    assert capsys.readouterr().err == ""
