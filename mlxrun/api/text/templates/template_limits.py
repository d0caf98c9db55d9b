"""Jinja's sandbox with limits of time and memory, for templates that nobody has read.

A sandbox keeps a template from files, but not from loops without end. `LimitedEnvironment` compiles a
template to code that counts. Each statement, call, operator, filter and test takes from the `WorkBudget` of
its thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, CompilerExit, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mlxrun.api.text.templates.work_budget import CONTAINERS, SHALLOW, WALKING, get_budget, get_size


class CountingGenerator(CodeGenerator):
    """Compiles templates to code that counts its steps."""

    def write_commons(self) -> None:
        """Write the beginning of each function of the code, with the function that counts a step."""
        super().write_commons()
        self.writeline("tick = environment.get_tick()")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        """Write a body that counts a step at its beginning, and before each statement but text."""
        self.writeline("tick()")
        try:
            for at, node in enumerate(nodes):
                if at and not _is_text(node):
                    self.writeline("tick()")
                self.visit(node, frame)
        except CompilerExit:
            pass

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write `~`, whose operands are measured before they are joined."""
        self._write_call("join_text", node.nodes, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Write a comparison. Both sides are measured unless one is a constant, with which it is short."""
        operands = [node.expr, *(each.expr for each in node.ops)]
        if len(operands) != 2 or any(isinstance(each, nodes.Const) for each in operands):
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._write_call("measure_operand", operands[:1], frame)
        self.write(f" {operators[node.ops[0].op]} ")
        self._write_call("measure_operand", operands[1:], frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Write a dict. Its keys are measured, since hashing a tuple walks through all that is in it."""
        self.write("{")
        for item in node.items:
            self._write_call("measure_operand", [item.key], frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Write a subscript. A slice counts, since it is a copy."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        parts = [nodes.Const(None) if each is None else each for each in bounds]
        self._write_call("take_slice", [node.node, *parts], frame)

    def _write_call(self, name: str, arguments: Sequence[nodes.Node], frame: Frame) -> None:
        """Write a call of a method of the environment."""
        self.write(f"environment.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Output) and all(isinstance(each, nodes.TemplateData) for each in node.nodes)


class CountedFilters(dict[str, Any]):
    """The filters of an environment. Their calls count, also those of filters that are added later."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        super().__init__()
        for name, function in table.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _count_function(name, function))


def _count_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that counts what it is given and what it returns."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        budget = get_budget()
        if len(args) > first:
            if hasattr(args[first], "__next__") and name not in SHALLOW:
                args = (*args[:first], list(args[first]), *args[first + 1 :])
            more = [*args[first + 1 :], *kwargs.values()]
            budget.spend(budget.measure_filter(name, args[first], more))
        found = function(*args, **kwargs)
        budget.spend(get_size(found))
        return found

    return count


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates have a budget. `finalize`: see jinja2.Environment.

    Its methods raise TemplateLimitError when the budget is spent."""

    code_generator_class = CountingGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, finalize: Callable[[Any], Any] | None = None, **kwargs: Any) -> None:
        chained = measure_output if finalize is None else lambda value: measure_output(finalize(value))
        super().__init__(*args, finalize=chained, **kwargs)
        self.filters = CountedFilters(self.filters)
        tests: dict[str, Any] = dict(self.tests)
        self.tests = tests | {name: _count_function(name, tests[name]) for name in WALKING}
        del self.globals["lipsum"]  # which makes as many words as it is told to

    def get_tick(self) -> Callable[[], None]:
        """Return the function that generated code calls at each step."""
        return get_budget().tick

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        listed = list(parts)
        get_budget().spend(sum(map(len, listed)))
        return "".join(listed)

    def join_text(self, *parts: Any) -> str:
        """Compute `~`."""
        budget = get_budget()
        for part in parts:
            budget.spend(budget.measure(part))
        return "".join(map(str, parts))

    def measure_operand(self, value: Any) -> Any:
        """Return the value. Measure it if it can be large."""
        if isinstance(value, (str, *CONTAINERS, Namespace)):
            budget = get_budget()
            budget.spend(budget.measure(value))
        return value

    def take_slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Compute a slice."""
        found = value[start:stop:step]
        get_budget().spend(get_size(found))
        return found

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Compute a subscript. A tuple as the key is measured, since hashing it walks through it."""
        if isinstance(argument, tuple):
            self.measure_operand(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `+`, `*`, `**` or `%` if the budget allows its result."""
        budget = get_budget()
        if operator == "+" and type(left) is type(right) is str:
            budget.spend(len(left) + len(right))
        elif operator != "+" or type(left) is not int:  # a sum is hardly longer than its parts
            budget.spend(budget.measure_operation(operator, left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function of the template, or a method of a value. SecurityError for `encode`."""
        budget = get_budget()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if owner is None:
            budget.tick()
        elif isinstance(owner, str):
            if __obj.__name__ == "encode":  # bytes are of no use to a template, and not counted
                raise SecurityError("a template makes no bytes")
            if __obj.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            budget.spend(budget.measure_method(owner, __obj.__name__, [*args, *kwargs.values()]))
        elif isinstance(owner, CONTAINERS) and args:
            budget.spend(budget.measure(args))
        found = super().call(__context, __obj, *args, **kwargs)
        budget.spend(get_size(found))
        return found


def measure_output(value: Any) -> Any:
    """Return a value that will be printed, and measure it."""
    if type(value) is not str:
        budget = get_budget()
        budget.spend(budget.measure(value))
    return value


@functools.cache
def limit_chat_templates() -> None:
    """Let transformers compile chat templates in `LimitedEnvironment`. This hook replaces the name of its
    sandbox class, so that the rest of its environment stays as it is."""
    from transformers.utils import chat_template_utils

    assert chat_template_utils.ImmutableSandboxedEnvironment is ImmutableSandboxedEnvironment
    chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
    chat_template_utils._compile_jinja_template.cache_clear()
