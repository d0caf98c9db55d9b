"""Merged config values keep their origins, and problems sort by where they are."""

from __future__ import annotations

from mlxrun.config.nodes import DEFAULT, ConfigNode, ConfigProblem, Origin

FILE = Origin("file", "a.yaml", 3, 5)
SET = Origin("set", "scheduler.policy")


def node(value: object, origin: Origin = DEFAULT) -> ConfigNode:
    return ConfigNode(value, origin)


def test_origins_read_as_places() -> None:
    assert [str(origin) for origin in (DEFAULT, FILE, SET, Origin("env", "MLXRUN_MODEL__PATH"))] == [
        "default",
        "a.yaml:3:5",
        "--set scheduler.policy",
        "MLXRUN_MODEL__PATH",
    ]


def test_mappings_merge_and_all_else_is_replaced() -> None:
    below = node({"a": node(1), "list": node([node(1), node(2)]), "deep": node({"x": node(1)})})
    top = node({"a": node(2, FILE), "list": node([node(3)], FILE), "deep": node({"y": node(2)})}, FILE)
    merged = below.merge(top)
    assert merged.strip_origins() == {"a": 2, "list": [3], "deep": {"x": 1, "y": 2}}
    found = merged.find(["a"])
    assert found is not None and found.origin == FILE
    kept = merged.find(["deep", "x"])
    assert kept is not None and kept.origin == DEFAULT


def test_a_path_leads_through_mappings_and_lists() -> None:
    tree = node({"a": node([node("x"), node("y")])})
    found = tree.find(["a", 1])
    assert found is not None and found.value == "y"
    assert tree.find(["a", "b"]) is None and tree.find(["c", "d"]) is None


def test_problems_sort_by_source_and_position() -> None:
    late = ConfigProblem.at(FILE, "scheduler.policy", "unknown")
    early = ConfigProblem.at(Origin("file", "a.yaml", 1, 1), "model", "missing")
    flag = ConfigProblem.at(SET, "scheduler.policy", "unknown")
    assert sorted([flag, late, early]) == [early, late, flag]
    assert late.text == "a.yaml:3:5: scheduler.policy: unknown" and late.key == "scheduler.policy"
    assert flag.text == "--set scheduler.policy: unknown", "the key is named once"
