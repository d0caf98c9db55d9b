"""The lists of fields in docs/server.md."""

from __future__ import annotations

from mlxrun.api.anthropic import fields as anthropic
from mlxrun.api.body_schema import BodySchema
from mlxrun.api.openai.fields import BODIES
from mlxrun.api.responses.fields import ABSENT_TOOLS, REFUSED_TOOLS
from mlxrun.api.responses.fields import BODY as RESPONSES
from tools.field_reference import FILE, list_accepted, list_refused, render_file

ALL = [BODIES["chat"], BODIES["completion"], RESPONSES, anthropic.BODY, anthropic.COUNT_BODY]


def test_the_document_is_fresh() -> None:
    """`make generate` writes it."""
    text = FILE.read_text(encoding="utf-8")
    assert render_file(text) == text
    assert render_file(text.replace("`use_beam_search`", "`beams`")) == text


def test_every_accepted_field_is_listed_with_its_reason() -> None:
    listed = {name: row for rows in list_accepted().values() for name, row in rows.items()}
    text = FILE.read_text(encoding="utf-8")
    for body in ALL:
        for name, (_, reason) in {**body.harmless, **body.ignored}.items():
            assert name in listed and f"`{name}`" in text and reason in text, name


def test_tools_that_are_left_out_are_listed() -> None:
    """A client that asks for a web search must be able to read that there is none."""
    assert list_accepted()["Tools of /v1/responses"].keys() == set(ABSENT_TOOLS)
    assert "`web_search`" in FILE.read_text(encoding="utf-8")


def test_every_refused_field_is_listed() -> None:
    listed = {name for rows in list_refused().values() for name in rows}
    for body in ALL:
        assert body.refused.keys() - body.ignored.keys() <= listed
    assert {*anthropic.REFUSED_BLOCKS, *REFUSED_TOOLS} <= listed


def test_a_field_has_one_treatment() -> None:
    """Honoured, or accepted with some values, or refused."""

    def is_plain(body: BodySchema) -> bool:
        return not body.honoured.keys() & (body.harmless.keys() | body.ignored.keys() | body.refused.keys())

    assert all(is_plain(body) for body in ALL)
    assert all(not body.harmless.keys() & body.refused.keys() for body in ALL)
    assert not is_plain(BodySchema({"x": {}}, ignored={"x": ({}, "twice")}))
