"""What the model sees of a Python function: name, description and schema, from signature and docstring."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.jobs.agents.tool_functions import ToolFunction, load_functions
from mlxrun.jobs.agents.tool_process import _FunctionTools

SOURCE = '''
from __future__ import annotations
from typing import Annotated, Any, Literal, TypedDict

class Place(TypedDict):
    x: float
    name: str

def search(
    query: str,
    limit: int = 5,
    kinds: list[Literal["a", "b"]] | None = None,
    where: Place | dict[str, int] = {},
    near: Annotated[bool, "Whether it is near."] = False,
    other: Any = None,
    untyped=None,
    *,
    state: dict,
) -> str:
    """Search the shop.

    It has many things.

    Args:
        query: Words to look for,
            in any order.
        limit (int): How many.

    Returns:
        text: What was found.
    """

def bare(): pass
def positional(a, /): pass
def many(*values): pass
def odd(value: object): pass
def unknown(value: Missing): pass
async def later(): pass
'''


def test_a_schema_is_made_from_signature_and_docstring(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(SOURCE)
    tool = load_functions(["tools.py:search"], tmp_path)["search"]
    assert tool.takes_state
    place = {"x": {"type": "number"}, "name": {"type": "string"}}
    kinds = {"type": "array", "items": {"enum": ["a", "b"]}}
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the shop.\n\nIt has many things.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for, in any order."},
                    "limit": {"type": "integer", "description": "How many.", "default": 5},
                    "kinds": {"anyOf": [kinds, {"type": "null"}]},
                    "where": {
                        "anyOf": [
                            {"type": "object", "properties": place, "required": ["name", "x"]},
                            numbers,
                        ],
                        "default": {},
                    },
                    "near": {"type": "boolean", "description": "Whether it is near.", "default": False},
                    "other": {},
                    "untyped": {},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_what_is_given_replaces_what_is_made(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(SOURCE)
    given = {"function": "tools.py:odd", "name": "any", "description": "D", "parameters": {"type": "object"}}
    found = load_functions([given, "tools.py:bare"], tmp_path)
    assert found["any"].schema["function"] == {
        "name": "any",
        "description": "D",
        "parameters": {"type": "object"},
    }
    assert "description" not in found["bare"].schema["function"] and not found["bare"].takes_state


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("positional", "the parameter 'a' has no name by which a model can give it"),
        ("many", "the parameter 'values' has no name"),
        ("odd", "the type of the parameter 'value' is not one of JSON; give the tool `parameters`"),
        ("unknown", "name 'Missing' is not defined"),
        ("later", "it is async; write a plain function"),
    ],
)
def test_functions_that_are_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "tools.py").write_text(SOURCE)
    with pytest.raises(JobError) as error:
        load_functions([f"tools.py:{name}"], tmp_path)
    assert f"tool 'tools.py:{name}'" in str(error.value) and says in str(error.value)


def test_results_and_errors_of_any_kind_are_text() -> None:
    class Text(str):
        def __str__(self) -> str:
            raise ValueError("no text")

        encode = __str__  # type: ignore[assignment]

    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    def fail() -> None:
        raise Broken

    made = {"text": lambda: Text("words"), "nan": lambda: [float("nan")], "fail": fail}
    tools = _FunctionTools({name: ToolFunction(each, False, {}) for name, each in made.items()})
    found = {name: tools.call(name, {}, {})[0] for name in made}
    assert type(found["text"]) is str and found["text"] == "words"
    assert found["nan"].startswith("error: ValueError: ") and found["fail"] == "error: Broken"
