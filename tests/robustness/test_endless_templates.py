"""Chat templates without end: the request or the line fails alone, and the event loop goes on."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.text.templates import template, work_budget
from mlxrun.cli.main import main
from tests.cli.conftest import fake_engine  # noqa: F401
from tests.helpers.batch_fakes import chat, write_job
from tests.helpers.server_fakes import run_server
from tests.helpers.tokenizers import CHATML, FakeModelInfo

# Endless for messages that say so.
TEMPLATE = (
    "{% if 'loop' in messages[-1].content %}{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}"
    "{% endfor %}{% endfor %}{% elif 'grow' in messages[-1].content %}{% set n = namespace(x='x') %}"
    "{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{% endif %}"
) + CHATML


@pytest.fixture(autouse=True)
def _small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that loops end after some thousand steps."""
    monkeypatch.setattr(work_budget, "BASE_BYTES", 1 << 20)


async def test_requests_contain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No template is rendered by the thread of the event loop."""
    threads: set[threading.Thread] = set()
    own = template.apply_limits

    def note(*arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return own(*arguments)

    async with run_server(model_info=FakeModelInfo(chat_template=TEMPLATE)) as s:

        async def post(text: str) -> Any:
            return await s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})

        await post("first")  # what the template supports is asked here
        monkeypatch.setattr(template, "apply_limits", note)
        replies = await asyncio.gather(*map(post, ["loop", "a", "grow", "b", "loop"]))
        assert [each.status for each in replies] == [400, 200, 400, 200, 400]
        assert "it loops or grows beyond what a template may compute" in replies[0].body.decode()
    assert threads and threading.current_thread() not in threads


@pytest.mark.usefixtures("fake_engine")
def test_lines_contain_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModelInfo, "__init__", _init_with_template)
    job = write_job(tmp_path, [chat("a", "say 1"), chat("b", "loop"), chat("c", "grow"), chat("d", "say 2")])
    assert main(["batch", str(job)]) == 1
    errors = [json.loads(line) for line in (tmp_path / "job.errors.jsonl").read_text().splitlines()]
    assert {each["custom_id"] for each in errors} == {"b", "c"}
    assert all("it loops or grows" in each["error"]["message"] for each in errors)
    assert "2 of 4 lines done" in capsys.readouterr().out


_own_init = FakeModelInfo.__init__


def _init_with_template(self: FakeModelInfo, *args: Any, **kwargs: Any) -> None:
    _own_init(self, *args, **{"chat_template": TEMPLATE, **kwargs})


def test_rows_contain_error_in_templates_of_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n2\n")
    endless = "{% for x in range(9999) %}{% for y in range(9999) %}{{ a }}{% endfor %}{% endfor %}"
    arguments = ["job", "make", str(tmp_path / "t.csv"), "-o", str(tmp_path / "o.jsonl"), "--prompt"]
    assert main([*arguments, endless]) == 2
    assert "the template cannot be filled in: it loops or grows" in capsys.readouterr().err
    deep = "{{ " + "(" * 5_000 + "a" + ")" * 5_000 + " }}"
    assert main([*arguments, deep]) == 2
    assert "--prompt: the template is nested too deeply" in capsys.readouterr().err
    assert not list(tmp_path.glob("o.jsonl*"))
