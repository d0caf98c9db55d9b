"""Every custom kernel of the package is one that the tests of this folder run. A new one fails here first."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import mlxrun
from tests.metal import conftest

PACKAGE = Path(mlxrun.__file__).parent
MAKERS = {"metal_kernel", "cuda_kernel", "precompiled_cuda_kernel"}  # of MLX
OWN_MAKER, ITS_PLACE = "make_kernel", "model/kernels/kernel_source.py"
# Where kernels are made, and the test file that runs them; then how their names begin.
KNOWN_PLACES = {
    "model/fused/operations.py": "tests/metal/test_fused_layers.py",
    "model/hooks/skinny_gemm.py": "tests/metal/test_skinny_gemm.py",
    "model/kv/paged/attention_kernel.py": "tests/metal/test_paged_attention.py",
}
KNOWN_NAMES = {"layer_", "skinny_gemm_", "paged_split_", "paged_join_"}


def uses_a_maker(tree: ast.AST, makers: Collection[str] = MAKERS) -> bool:
    """Whether functions that make kernels are named, also as a text for `getattr`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                found = name
            case ast.Constant(value=str(name)):
                found = name
            case _:
                continue
        if found in makers:
            return True
    return False


def list_names(tree: ast.AST) -> Iterator[str]:
    """How the names of kernels begin: the second arguments of `make_kernel`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == OWN_MAKER:
            name = node.args[1]
            first = name.values[0] if isinstance(name, ast.JoinedStr) else name
            assert isinstance(first, ast.Constant), "a kernel's name begins with a constant"
            yield str(first.value)


def test_every_kernel_of_the_package_is_tested() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {
        str(path.relative_to(PACKAGE)): ast.parse(text)
        for path, text in texts.items()
        if any(maker in text for maker in (*MAKERS, OWN_MAKER))
    }
    assert [path for path, tree in trees.items() if uses_a_maker(tree)] == [ITS_PLACE], "use make_kernel"
    places = [path for path, tree in trees.items() if uses_a_maker(tree, {OWN_MAKER})]
    assert places == list(KNOWN_PLACES), "test the new kernel in tests/metal, then name it here"
    assert {name for path in places for name in list_names(trees[path])} == KNOWN_NAMES
    assert all((PACKAGE.parent / test).is_file() for test in KNOWN_PLACES.values())


@pytest.mark.parametrize("source", ["mx.fast.metal_kernel(name='a')", "from x import cuda_kernel"])
def test_a_new_kernel_is_seen(source: str) -> None:
    assert uses_a_maker(ast.parse(source)) and not uses_a_maker(ast.parse("attend_pages(kernel)"))
    made = ast.parse("make_kernel(backend, f'new_{x}', [], [], SOURCE, HEADER)")
    assert list(list_names(made)) == ["new_"]


def test_without_a_compiler_the_tests_say_why_they_are_skipped(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(conftest, "find_compiler", lambda: None)
    with pytest.raises(pytest.skip.Exception, match=r"emulated on Linux, with clang\+\+-19"):
        request.getfixturevalue("emulator")
