"""The page: one file, which loads and runs nothing but what is in it, whatever the texts of a run are."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from mlxrun.evals.reports import page
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import chats
from tests.helpers.report_jobs import (
    HOSTILE,
    hostile_lines,
    mixed_lines,
    read_lines,
    run_lines,
    run_other_answers,
    write_suite,
)


class Elements(HTMLParser):
    """All elements with their attributes, and the texts of scripts and styles by place."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.comments = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.found[-1] if self.found else ("", {})
        if self.cdata_elem in ("script", "style"):
            self.raw.append(({"tag": tag, **attributes}, data))
        else:
            self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments += 1

    def list_values(self, *names: str) -> Iterator[str]:
        for _, attributes in self.found:
            yield from (value for name in names if (value := attributes.get(name)) is not None)


def find_dangers(html: str) -> list[str]:
    """What a page has that could load or run something that it did not bring along."""
    elements = Elements(html)
    found = [
        f"{tag} {name}"
        for tag, attributes in elements.found
        for name in attributes
        if name.startswith("on") or name == "style"
    ]
    found += [tag for tag, _ in elements.found if tag in ("iframe", "object", "embed", "base", "form", "img")]
    found += [
        link for link in elements.list_values("src", "href", "action") if not re.match(r"#|data:,$", link)
    ]
    found += ["a comment, which hides what follows"] * elements.comments
    (policy,) = [attributes["content"] for _, attributes in elements.found if attributes.get("http-equiv")]
    assert policy is not None
    for attributes, text in elements.raw:
        if attributes.get("type") == "application/json":
            json.loads(text)
            continue
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        if f"'sha256-{digest}'" not in policy:
            found.append(f"{attributes['tag']} that the policy forbids: {text[:40]}")
    return found


async def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    html = page.render_page(await read_lines(tmp_path, hostile_lines()))
    assert find_dangers(html) == []
    elements = Elements(html)
    assert sum(tag == "script" for tag, _ in elements.found) == 3, "the columns, one chunk, the program"
    (chunk,) = [json.loads(text) for attributes, text in elements.raw if attributes.get("id") == "chunk-0"]
    assert [row["prompt"][0][1] for row in chunk["rows"]] == list(HOSTILE)
    for row, text in zip(chunk["rows"], HOSTILE, strict=True):
        assert row["runs"][0]["answer"].startswith(text) and row["runs"][0]["expected"] == text


async def test_texts_that_are_not_escaped_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above: without the escapes of JSON, or of the templates, it fails."""
    runs = await read_lines(tmp_path, hostile_lines())
    with monkeypatch.context() as patch, pytest.raises((AssertionError, ValueError)):
        patch.setattr(page, "_ESCAPES", {})
        assert find_dangers(page.render_page(runs)) == []
    with monkeypatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(page.shown_text, "show_html", str)
        patch.setattr(page, "make_environment", _make_careless(page.make_environment))
        assert find_dangers(page.render_page(runs)) == []


def _make_careless(make):  # type: ignore[no-untyped-def]
    def make_environment():  # type: ignore[no-untyped-def]
        environment = make()
        environment.autoescape = False
        return environment

    return make_environment


async def test_the_policy_forbids_the_network(tmp_path: Path) -> None:
    html = page.render_page(await read_lines(tmp_path, chats(1)))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].replace("&#39;", "'").split(";"))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", rules[name])
    assert rules["base-uri"] == rules["form-action"] == "'none'"
    assert not re.search(r"""["'(]https?://(?!www\.w3\.org/2000/svg)""", html), "no address of another host"


async def test_sections_of_one_run(tmp_path: Path) -> None:
    html = page.render_page(await read_lines(tmp_path, mixed_lines()))
    ids = set(Elements(html).list_values("id"))
    assert {"scores", "reliability", "speed", "settings", "lines"} <= ids
    assert not ids & {"difference", "matrix"}
    text = " ".join(Elements(html).text.split())
    assert "Why lines failed" in text and "not JSON" in text
    assert re.search(r"Found in the prefix cache, by requests: nothing \d+\.", text)


async def test_sections_of_two_runs(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", chats(6))
    second = await run_other_answers(tmp_path / "b", chats(6), {"line-1"})
    elements = Elements(page.render_page(read_runs([first.paths.out, second.paths.out])))
    assert "difference" in set(elements.list_values("id"))
    assert "flip" in set(elements.list_values("data-state")) & set(elements.list_values("value"))
    text = " ".join(elements.text.split())
    assert "0 lines better and 1 worse, of 6." in text


async def test_sections_of_a_suite(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    for name in ("m1/sums/seed-1", "m1/names/seed-1", "m2/sums/seed-1"):
        await run_lines(suite / name, chats(4))
    write_suite(suite)
    elements = Elements(page.render_page(read_runs([suite])))
    ids = set(elements.list_values("id"))
    assert {"matrix", "scores", "filter-task", "filter-run"} <= ids
    assert "not run" in elements.text


async def test_problems_and_unfinished_lines_are_shown(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(3))
    bench.paths.journal.unlink()
    elements = Elements(page.render_page(read_runs([bench.job])))
    assert "Problems in the run folders" in elements.text and "journal.jsonl: is missing" in elements.text


async def test_images_are_inside_the_page(tmp_path: Path) -> None:
    Image.new("RGB", (40, 40), (0, 90, 200)).save(tmp_path / "a.png")
    content = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "What?"}]
    runs = await read_lines(tmp_path, [{"id": "v", "messages": [{"role": "user", "content": content}]}])
    html = page.render_page(runs)
    assert '["data:image/webp;base64,' in html and '"a.png"]' in html and find_dangers(html) == []


def test_colours_have_enough_contrast() -> None:
    """WCAG 2.2's 4.5 to 1 for each colour of text on both papers, light and dark."""
    css = page._read_asset("report.css")
    pairs = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", css))
    for side in (0, 1):
        colours = {name: pair.split(", ")[side] for name, pair in pairs.items()}
        for name in set(colours) - {"paper", "wash", "rule"}:
            for ground in ("paper", "wash"):
                assert compute_contrast(colours[name], colours[ground]) >= 4.5, (name, ground, side)


def compute_contrast(first: str, second: str) -> float:
    def measure(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((measure(first), measure(second)))
    return (high + 0.05) / (low + 0.05)
