"""The documentation: the site builds without a warning or a foreign resource, its reference is complete, and
the commands and config keys that the pages show exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mlxrun.cli.main import COMMANDS, cli
from mlxrun.config.setting_fields import list_fields, list_sections
from mlxrun.server.app import list_surfaces
from tests.helpers.command_processes import run_program
from tools.docs_site.hooks import ROOT
from tools.docs_site.reference import list_commands, list_errors, render_api, render_commands, render_errors

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# What a browser loads by itself from another host.
FETCHED = re.compile(r'<(?:script|img|source|iframe|link)\b[^>]*(?:src|href|srcset)="(?:https?:)?//')
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def build_site(repository: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site, as `make docs` does. (With `--quiet`, `--strict` would count no warning.)"""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return run_program(command, cwd=repository, env=environ)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of the same files, whose pages are a copy."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("docs", "site", "mkdocs.yml") and not path.name.startswith("."):
            (copy / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", copy / "docs")
    shutil.copy(ROOT / "mkdocs.yml", copy)
    return copy


@pytest.mark.thorough
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    done = build_site(ROOT, tmp_path / "site")
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not FETCHED.search(text), page.name
    for name in ("first-steps", "reference/cli", "reference/api", "reference/errors", "CONTRIBUTING"):
        assert (tmp_path / "site" / f"{name}.html").is_file()


@pytest.mark.thorough
def test_the_build_sees_what_is_broken(repository: Path) -> None:
    with (repository / "docs/server.md").open("a", encoding="utf-8") as file:
        file.write("\n[a](no-such-page.md) and [b](config.md#no-such-section)\n")
    (repository / "docs/lost.md").write_text("# A page that no menu has\n", encoding="utf-8")
    done = build_site(repository, repository / "site")
    assert done.returncode == 1
    assert all(name in done.stderr for name in ("no-such-page", "no-such-section", "lost.md")), done.stderr


@pytest.mark.thorough
def test_the_build_sees_a_link_to_a_file_that_is_gone(repository: Path) -> None:
    (repository / "docs/index.md").write_text("# mlxrun\n\n[a](../no/such/file.py)\n", encoding="utf-8")
    done = build_site(repository, repository / "site")
    assert done.returncode == 1 and "index.md links to ../no/such/file.py" in done.stderr


def test_the_reference_has_every_command_and_option() -> None:
    text = render_commands()
    names = [name for name, _ in list_commands(cli)]
    assert {name.split()[1] for name in names} == set(COMMANDS)
    for name, command in list_commands(cli):
        body = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        options = [option for param in command.params for option in param.opts if option.startswith("--")]
        assert all(option in body for option in options if not _is_hidden(command, option)), name


def _is_hidden(command: click.Command, option: str) -> bool:
    return any(option in param.opts and getattr(param, "hidden", False) for param in command.params)


def test_the_reference_has_every_field_and_error() -> None:
    text = render_api()
    for surface in (each for each in list_surfaces() if each.is_api):
        for endpoint in surface.endpoints:
            assert f"| `{endpoint.method} {endpoint.path}` |" in text
            fields = (endpoint.body or {}).get("properties", {})
            body = text.partition(f"\n## {endpoint.method} {endpoint.path}\n")[2].split("\n## ")[0]
            assert all(f"| `{name}` |" in body for name in fields), endpoint.path
    rows = render_errors()
    assert all(f"| `{found.code}` | {found.http_status} |" in rows for found in list_errors())


def read_commands(text: str) -> Iterator[list[str]]:
    """The words of each command `mlxrun ...` in the code blocks of a page, without what is said beside it."""
    for block in re.findall(r"^ *```(?:\w+)?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:[A-Z_]+=\S+ )*mlxrun (?P<rest>[a-z].*)", line.strip())
            if found:
                yield shlex.split(re.split(r" {2,}| [|&] ?", found["rest"])[0], comments=True)


def check_command(words: list[str]) -> None:
    """Raise click's error if there is no such command or option. Files need not exist."""
    command: click.Command = cli
    context = click.Context(cli, info_name="mlxrun")
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        if found is None:
            raise click.UsageError(f"there is no command {words[0]}")
        command, words = found, words[1:]
    command.make_parser(click.Context(command)).parse_args(list(words))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for words in read_commands(page.read_text(encoding="utf-8")):
        try:
            check_command(words)
        except click.ClickException as error:
            pytest.fail(f"{' '.join(words)}: {error.format_message()}")


def test_commands_are_found_and_wrong_ones_are_seen() -> None:
    text = "```\nX=1 mlxrun batch a.jsonl --limit 3     what it does\n```\n"
    assert list(read_commands(text)) == [["batch", "a.jsonl", "--limit", "3"]]
    for wrong in (["batch", "a.jsonl", "--limitt", "3"], ["bach", "a.jsonl"], ["config", "chek"]):
        with pytest.raises(click.UsageError):
            check_command(wrong)


def list_unknown_keys(text: str) -> set[str]:
    """What is written as a config key, in code, and is none."""
    keys = {f"{field.section}.{field.key}" for field in list_fields().values() if field.section}
    sections = "|".join(list_sections())
    written = re.findall(rf"`(?:--set )?((?:{sections})\.[a-z_]+)(?=[`:=])", text)
    return {key for key in set(written) - keys if not is_module(key) and not key.endswith(".js")}


def is_module(name: str) -> bool:
    return (ROOT / "mlxrun" / name.replace(".", "/")).with_suffix(".py").is_file()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_config_keys_of_a_page_exist(page: Path) -> None:
    assert list_unknown_keys(page.read_text(encoding="utf-8")) == set()


def test_a_key_that_is_gone_is_seen() -> None:
    assert list_unknown_keys("`engine.client` is a module") == set()
    assert list_unknown_keys("`scheduler.max_running`, `scheduler.max_walking: 3`") == {
        "scheduler.max_walking"
    }
