"""UI-TARS: `Thought: ...`, a line feed and `Action: click(start_box='(1,2)')`, or several actions on lines.

The format is that of the prompts that come with the model, whose chat template does not show it: it is read
where the config names it. Each action is a call of an offered tool of its name.
"""

from __future__ import annotations

from mlxrun.api.parsers.families.pythonic import read_call
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.readers.tagged_arguments import is_followed
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_ACTION, _OPENER = "Action:", "Thought:"


def _read(s: TextStream, opener: str) -> Step[None]:
    names = tuple(f"{name}(" for name in s.tools.names)
    if not opener and not (yield from is_followed(s, names)):
        raise Malformed
    more = True
    while more:
        yield from s.skip_space()
        more = (yield from _read_action(s)) and (yield from is_followed(s, names))
        s.commit()


def _read_action(s: TextStream) -> Step[bool]:
    """Read one action, whose arguments may be one object of JSON. False: the tool is not offered."""
    objects = tuple(f"{name}({{{first}" for name in s.tools.names for first in '"}')
    if not (yield from is_followed(s, objects)):
        return (yield from read_call(s))
    name, _ = yield from s.read_name("(")
    yield from read_arguments(s, s.begin_call(name))
    yield from s.skip(")")
    return True


FAMILY = ToolCallFamily(
    name="ui_tars",
    detect=lambda template, tokens: False,
    openers=(_ACTION,),
    read=_read,
    read_start=_read,  # behind the reasoning, which the opener closes
    prefix_suffix=lambda name: (f"{_ACTION} {name}(", ")"),
)
REASONING = ReasoningFamily(
    name="ui_tars",
    detect=lambda template, tokens: False,
    pairs=((_OPENER, (_ACTION,)),),
    closing=f"\n{_ACTION}",
)
