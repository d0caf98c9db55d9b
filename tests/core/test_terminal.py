"""Standard output and standard error with the filter, and consoles beside it."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table

import mlxrun
from mlxrun.core.terminal import (
    FilteredStream,
    escape_unknown_characters,
    filter_streams,
    open_console,
    print_error,
    print_json,
    print_line,
    print_text,
)

ROOT = Path(mlxrun.__file__).parent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_whoever_prints_is_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    outside = sys.stdout
    with filter_streams():
        with filter_streams():
            print("a\x1b[2J\rb\ud800")
            sys.stderr.writelines(["\x9b", "\n"])
        assert isinstance(sys.stdout, FilteredStream) and not sys.stdout.isatty()
        assert sys.stdout.unfiltered is outside
    assert sys.stdout is outside
    assert capsys.readouterr() == ("a\\x1b[2J\\rb\\ud800\n", "\\x9b\n")


def test_bytes_are_refused_as_by_a_text_stream() -> None:
    with pytest.raises(TypeError):
        FilteredStream(io.StringIO()).write(b"a")  # type: ignore[arg-type]


def test_bars_of_libraries_move_on_a_terminal_only() -> None:
    for stream, shown in (
        (Terminal(), "\r50 %\x1b[A\x1b[A\\x1b[Ax"),
        (io.StringIO(), "\\r50 %\\x1b[A\\x1b[A\\x1b[Ax"),
    ):
        filtered = FilteredStream(stream)
        for text in ("\r50 %", "\x1b[A\x1b[A", "\x1b[Ax"):
            filtered.write(text)
        assert stream.getvalue() == shown


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("a\nb\x1b")
    print_error("x" * 9000)
    print_text("a\nb\x1b\n")
    print_json({"a": "\x9b"})
    out, err = capsys.readouterr()
    assert out == 'a\\nb\\x1b\na\nb\\x1b\n{\n  "a": "\\u009b"\n}\n'
    assert len(err) <= 2001 and err.count("\n") == 1
    assert json.loads(out[out.index("{") :]) == {"a": "\x9b"}


@pytest.mark.parametrize("make", [Terminal, io.StringIO])
def test_a_console_styles_what_it_has_filtered(make: type[io.StringIO]) -> None:
    """Tables are laid out with what is shown: their columns stay straight."""
    stream = make()
    console = open_console(FilteredStream(stream), width=60)
    table = Table("name\x1b[8m", "value", box=None)
    for name in ("a\x1b]0;x\x07", "plain\nforged"):
        table.add_row(name, "1")
    console.print(table)
    shown = stream.getvalue()
    assert "\x1b]" not in shown and "\x1b[8m" not in shown and "\\x1b]0;x\\x07" in shown
    rows = [line.rstrip() for line in shown.splitlines()]
    assert len(rows) == 3 and "plain\\nforged" in rows[2]
    if make is not Terminal:
        assert rows[1].rindex("1") == rows[2].rindex("1")


def test_texts_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich replaces the streams while it shows a bar; what is printed then is filtered too."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    with filter_streams(), Progress(console=open_console(), auto_refresh=False) as bar:
        bar.add_task("a\x1b]0;x\x07", total=2)
        with filter_streams():
            print("\x1b[8mtext")
    assert "\x1b[8m" not in terminal.getvalue() and "\\x1b[8mtext" in terminal.getvalue()
    assert "\x1b]0" not in terminal.getvalue()


def list_prints(path: Path) -> list[str]:
    """Calls that write to the streams without the functions of terminal.py."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in {"print", "click.echo", "click.secho", "Console", "sys.stdout.write", "sys.stderr.write"}:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


def test_all_of_mlxrun_prints_here() -> None:
    """One place: no other module prints, nor makes a console."""
    others = [path for path in sorted(ROOT.rglob("*.py")) if "recipe" not in path.parts]
    assert len(list_prints(ROOT / "core" / "terminal.py")) == 3
    assert [each for path in others if path.name != "terminal.py" for each in list_prints(path)] == []


def test_what_a_locale_lacks_is_escaped_as_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an answer on a terminal of Latin-1, or where PYTHONIOENCODING says so."""
    for encoding, expected in (
        ("ascii", b"caf\\u00e9 \\ud83d\\ude00"),
        ("latin-1", b"caf\xe9 \\ud83d\\ude00"),
    ):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
        escape_unknown_characters()
        with filter_streams():
            print_line("caf\xe9 \U0001f600")
        assert written.getvalue() == expected + b"\n"
