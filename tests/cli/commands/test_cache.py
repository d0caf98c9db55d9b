"""`mlxrun cache`: what it shows, what it deletes and what it leaves alone, and its exit codes."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlxrun.cli import options
from mlxrun.cli.commands import cache
from mlxrun.cli.main import main
from mlxrun.core.step_plan import SnapshotKind
from tests.helpers.cache_files import OTHER, ROOT, make_entry, write_entry
from tests.helpers.command_processes import run_program
from tests.helpers.plain_user import obey_permissions

PATH = "big.out.jsonl.run/cache"


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mlxrun")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three entries of one model, one of another, and files that are not ours."""
    monkeypatch.chdir(tmp_path)
    where = tmp_path / PATH
    for number, part in enumerate((SnapshotKind.DELTA, SnapshotKind.DELTA, SnapshotKind.STATE)):
        path = write_entry(where, number, kind=part)[2]
        os.utime(path, (1000 + number, 1000 + number))
    write_entry(where, 9, root=OTHER, kind=SnapshotKind.STATE)
    (where / "readme.txt").write_text("mine")
    (where / ROOT.hex() / "model.safetensors").write_text("mine")
    return where


def list_entry_files(where: Path) -> list[Path]:
    return sorted(path for path in where.rglob("*.safetensors") if path.name != "model.safetensors")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["cache", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.usefixtures("kept")
def test_ls_is_one_line_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ls", "--path", PATH)
    title, one, two = out.splitlines()
    assert (code, err, title) == (0, "", f"{PATH}:")
    assert one.startswith(f"  {ROOT.hex()[:16]}  3 entries, 8 tokens, ") and " used 1970-01-01 " in one
    assert two.startswith(f"  {OTHER.hex()[:16]}  1 entry, 4 tokens, ")


@pytest.mark.usefixtures("kept")
def test_ls_entries_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "ls", "--entries", "--path", PATH)[1].splitlines()
    assert len(lines) == 7
    assert lines[2].split()[:4] == [make_entry(0)[0].key.hex(), "delta", "tokens", "8-12"]
    assert lines[4].split()[:2] == [make_entry(2, kind=SnapshotKind.STATE)[0].key.hex(), "state"]
    assert lines[4].endswith("evicted last") and not lines[3].endswith("evicted last")


def test_the_old_name_of_entries_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "ls", "--records")
    assert code == 2 and "--records is now called --entries" in err


def test_ls_json(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "ls", "--path", PATH, "--entries", "--json")[1])
    assert (found["format"], found["path"]) == (2, PATH)
    one, two = found["models"]
    assert (one["fingerprint"], one["entries"], one["tokens"], one["unreadable"]) == (ROOT.hex(), 3, 8, 0)
    assert one["bytes"] == sum(path.stat().st_size for path in list_entry_files(kept / ROOT.hex()))
    assert (one["oldest_use"], one["newest_use"]) == (1000, 1002)
    assert [entry["used"] for entry in one["entry_list"]] == [1000, 1001, 1002]
    assert two["entry_list"][0]["kind"] == "state"


def test_ls_changes_nothing_and_names_what_it_cannot_read(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = list_entry_files(kept / ROOT.hex())[0]
    bad.write_bytes(b"torn")
    code, out, err = run(capsys, "ls", "--path", PATH)
    assert code == 0 and ", 1 unreadable" in out and "mlxrun cache verify" in err
    assert bad.exists()


def test_the_folder_is_that_of_the_config(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.yaml").write_text(f"cache:\n  backend: disk\n  disk_path: {kept}\n")
    assert run(capsys, "ls", "-c", "mine.yaml")[1].startswith(f"{kept}:\n")
    sets = ("--set", "cache.backend=disk", "--set", f"cache.disk_path={kept}")
    assert run(capsys, "ls", *sets)[1].startswith(f"{kept}:\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept / "none"))
    code, out, _ = run(capsys, "ls")
    assert (code, out) == (0, f"{kept}/none/mlxrun/prefixes: there are no entries here\n")
    assert run(capsys, "ls", "--path", "missing")[0] == 2
    assert run(capsys, "ls", "-c", "missing.yaml")[0] == 2


@pytest.mark.parametrize("given", [["ls"], ["verify"], ["clear", "--yes"]], ids=lambda given: given[0])
def test_the_folder_alone_is_enough(
    kept: Path, given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look into a folder nobody has to say that a run would use it: by flag, file and environment."""
    place = f"cache.disk_path={kept}"
    assert run(capsys, *given, "--set", place)[1].startswith(f"{kept}:")
    Path("mlxrun.yaml").write_text(f"cache:\n  backend: memory\n  disk_path: {kept}\n")
    assert run(capsys, *given)[1].startswith(f"{kept}:")
    Path("mlxrun.yaml").unlink()
    monkeypatch.setenv("MLXRUN_CACHE__DISK_PATH", str(kept))
    assert run(capsys, *given)[1].startswith(f"{kept}:")


def test_the_flags_are_those_of_serve(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What serve would refuse as a contradiction of its flags is one here too."""
    both = ("--set", "cache.backend=memory", "--set", f"cache.disk_path={kept}")
    code, out, err = run(capsys, "ls", *both)
    assert (code, out) == (2, "") and "has no effect while cache.backend is memory" in err
    code, out, err = run(capsys, "ls", "--set", "cache.disk_path=nothing/here")
    assert (code, out) == (
        0,
        f"{Path.cwd() / 'nothing/here'}: there are no entries here\n",
    ) and "cache.backend: disk" in err


def test_verify_finds_what_ls_does_not(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "verify", "--path", PATH) == (
        0,
        f"{PATH}: 4 good, 0 bad, 2 other files not read\n",
        "",
    )
    bad = list_entry_files(kept)[1]
    data = bytearray(bad.read_bytes())
    data[-1] ^= 1
    bad.write_bytes(data)
    code, out, _ = run(capsys, "verify", "--path", PATH)
    assert code == 1 and bad.exists()
    assert out == (
        f"{bad.relative_to(Path.cwd())}: its checksum is wrong: it was changed or damaged\n"
        f"{PATH}: 3 good, 1 bad, 2 other files not read; --delete removes them\n"
    )
    found = json.loads(run(capsys, "verify", "--path", PATH, "--json")[1])
    assert (found["good"], found["deleted"], len(found["bad"]), found["foreign"]) == (3, False, 1, 2)
    code, out, _ = run(capsys, "verify", "--path", PATH, "--delete")
    assert code == 1 and out.endswith("3 good, 1 bad, 2 other files not read\n")
    assert not bad.exists() and len(list_entry_files(kept)) == 3
    assert run(capsys, "verify", "--path", PATH)[0] == 0


def test_clear_of_all_leaves_what_is_not_ours(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    total = sum(path.stat().st_size for path in list_entry_files(kept))
    code, out, _ = run(capsys, "clear", "--yes", "--path", PATH)
    assert (code, out) == (0, f"{PATH}: 4 entries deleted, {total / 1000:.1f} kB freed\n")
    left = sorted(path.relative_to(kept) for path in kept.rglob("*"))
    assert left == [Path(ROOT.hex()), Path(ROOT.hex(), "model.safetensors"), Path("readme.txt")]
    assert run(capsys, "clear", "--path", PATH)[:2] == (0, f"{PATH}: 0 entries deleted, 0 B freed\n")


def test_clear_of_one_model(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "clear", "--yes", "--model", OTHER.hex()[:4].upper(), "--path", PATH, "--json")
    assert (code, json.loads(out)["deleted"]) == (0, 1)
    assert len(list_entry_files(kept)) == 3 and not (kept / OTHER.hex()).exists()
    code, _, err = run(capsys, "clear", "--yes", "--model", "ffff", "--path", PATH)
    assert code == 2 and "no such model; see `mlxrun cache ls`" in err
    write_entry(kept, 9, root=OTHER)
    for prefix in ("0", ""):
        code, _, err = run(capsys, "clear", "--yes", "--model", prefix, "--path", PATH)
        assert code == 2 and "give more digits" in err
    assert len(list_entry_files(kept)) == 4


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("n\n", 1, 4), ("\n", 1, 4)])
def test_clear_asks(answer: str, code: int, left: int, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "can_ask", lambda: True)
    done = CliRunner().invoke(cache.command, ["clear", "--path", PATH], input=answer, standalone_mode=False)
    assert done.return_value == code
    assert "Delete 4 entries (" in done.stderr and " of 2 models in " in done.stderr
    assert len(list_entry_files(kept)) == left


def test_clear_does_not_ask_where_nobody_answers(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "can_ask", lambda: False)
    code, _, err = run(capsys, "clear", "--path", PATH)
    assert code == 2 and "give --yes" in err
    assert len(list_entry_files(kept)) == 4


def test_clear_says_what_it_could_not_delete(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept / OTHER.hex()).chmod(0o500)
    with obey_permissions():
        code, out, err = run(capsys, "clear", "--yes", "--path", PATH)
    (kept / OTHER.hex()).chmod(0o700)
    assert code == 1 and out.startswith(f"{PATH}: 3 entries deleted")
    assert err.startswith("not deleted: ") and "Permission denied" in err


@pytest.mark.parametrize("name", ["ls", "verify", "clear"])
def test_every_subcommand_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and f"mlxrun cache {name}" in out and "X.out.jsonl.run/cache" in out


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("arguments", [["ls", "--entries"], ["verify"], ["clear", "--yes"]], ids=" ".join)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    heavy = {"mlx", "mlx_lm", "mlx_vlm", "transformers", "aiohttp", "numpy", "safetensors"}
    code = (
        "import sys\n"
        "from mlxrun.cli.main import main\n"
        f"status = main(['cache', *{arguments!r}, '--path', {PATH!r}])\n"
        f"found = sorted({heavy!r} & {{name.partition('.')[0] for name in sys.modules}})\n"
        "sys.exit(f'imported: {found}' if found else status)\n"
    )
    root = Path(__file__).parents[3]
    done = run_program([sys.executable, "-c", code], env={"PYTHONPATH": str(root)})
    assert (done.returncode, done.stderr) == (0, "")
