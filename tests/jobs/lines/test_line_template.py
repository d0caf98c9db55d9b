"""Templates of job lines: texts and whole lines, values with their types, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.line_template import LineTemplate, make_message_template, read_template
from mlxrun.jobs.lines.table_files import RowError


def render(value: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return LineTemplate(value, "t").render(columns, 7)


def test_a_text_is_the_message_of_a_user() -> None:
    template = make_message_template("{% for x in xs %}{{ x }};{% endfor %}\n{{ row['two words'] }}", "t")
    content = template.render({"xs": [1, 2], "two words": "yes"}, 1)["messages"][0]
    assert content == {"role": "user", "content": "1;2;\nyes"}


def test_values_keep_their_types_where_an_api_takes_them() -> None:
    line = render(
        {
            "id": "{{ key }}-{{ row_number }}",
            "messages": [{"role": "user", "content": "{{ number }}"}],
            "max_tokens": "{{ number * 2 }}",
            "stop": "{{ stop }}",
            "seed": "{{ nothing }}",
            "eval": {"expected": "{{ number }}", "group": "g {{ number }}"},
            "tools": [],
            "temperature": 0,
        },
        key="k",
        number=4,
        stop=["a", "b"],
        nothing=None,
    )
    assert line == {
        "id": "k-7",
        "messages": [{"role": "user", "content": "4"}],
        "max_tokens": 8,
        "stop": ["a", "b"],
        "seed": None,
        "eval": {"expected": 4, "group": "g 4"},
        "tools": [],
        "temperature": 0,
    }


def test_messages_can_be_a_column() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert render({"messages": "{{ chat }}"}, chat=messages) == {"messages": messages}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ b }}", "the template cannot be filled in: 'b' is undefined"),
        ("x {{ b }}", "the template cannot be filled in: 'b' is undefined"),
        ("{{ row['b'] }}", "the template cannot be filled in: 'dict object' has no attribute 'b'"),
        ("x {{ n }}", "the template cannot be filled in: a value is null; write default('...', true)"),
        ("{{ n }}", "the template cannot be filled in: a value is null; write default('...', true)"),
        ("x {{ raw }}", "the template cannot be filled in: a value is bytes, which are no text"),
        ("x {{ raws }}", "the template cannot be filled in: a value is bytes, which are no text"),
        ("{{ nan }}", "the template cannot be filled in: a value is nan, which is no number of JSON"),
        ("x {{ row }}", "the column 'row' has the name of a variable of templates; rename the column"),
        ("{{ a + 1 }} x", "the template fails: TypeError"),
        ("{{ a.__class__ }}", "the template cannot be filled in: access to attribute '__class__'"),
        (
            "{{ ''.__class__.__mro__ ~ a }}",
            "the template cannot be filled in: access to attribute '__class__'",
        ),
    ],
)
def test_what_a_row_cannot_fill_in(text: str, says: str) -> None:
    with pytest.raises(RowError) as caught:
        cells = {"raw": b"1", "raws": [b"1"], "nan": float("nan")} | ({"row": 1} if "row }}" in text else {})
        render({"prompt": text, "eval": {"expected": "{{ a }}"}}, a="1", n=None, **cells)
    assert str(caught.value).startswith(says)


def test_a_default_stands_for_a_column_that_is_missing() -> None:
    text = "{{ b | default('none') }}{% if c is defined %}{{ c }}{% endif %}{{ n | default('-', true) }}"
    assert render({"prompt": text}, a="1", n=None) == {"prompt": "none-"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.jinja", "{{ a", "t.jinja: line 1 of the template: unexpected"),
        ("t.txt", "no column", "t.txt: the template uses no column; write {{ column }}"),
        ("t.yaml", "prompt: {{ a }}", "not a list or a mapping; values with {{ }} need quotes"),
        ("t.yaml", "prompt: [", "t.yaml:1:10: this is not YAML"),
        ("t.yaml", "- a", "t.yaml: a template of this kind is a mapping with the fields of a job line"),
        ("t.json", '{"prompt": "{{ a }}", "prompt": "x"}', "t.json:1:23: prompt: this key has a value"),
    ],
)
def test_templates_with_a_mistake(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(JobError) as caught:
        read_template(path)
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot read the template: No such file"):
        read_template(tmp_path / "none.jinja")
    (tmp_path / "t.jinja").write_bytes(b"\xff")
    with pytest.raises(JobError, match="the template is not UTF-8 text"):
        read_template(tmp_path / "t.jinja")


def test_the_line_end_of_a_file_is_no_part_of_the_message(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("say {{ a }}\n")
    line = read_template(tmp_path / "t.jinja").render({"a": "x"}, 1)
    assert line["messages"][0]["content"] == "say x"


def test_a_column_called_row_harms_only_templates_that_use_the_variable() -> None:
    assert render({"prompt": "{{ a }}"}, a="1", row=3) == {"prompt": "1"}
    with pytest.raises(RowError, match="the column 'row_number' has the name of a variable"):
        render({"prompt": "{{ row_number }}"}, row_number=3)
