"""Step 3.5: the XML of Qwen3-Coder in `<tool_call>` tags; Step 3's `<steptml:invoke name="f">` too."""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.families import hermes
from mlxrun.api.parsers.readers.invoke_tags import InvokeTags
from mlxrun.api.parsers.readers.tagged_arguments import OPENER
from mlxrun.api.parsers.text_stream import Step, TextStream

_TAGS = InvokeTags("steptml:")
_IGNORED = (
    *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    *("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from (_TAGS.read if opener == _TAGS.opener else hermes.read)(s, opener)


def _detect(template: str, tokens: frozenset[str]) -> bool:
    step_3_5 = OPENER in template and "functions in JSONSchema format" in template
    return step_3_5 or "<steptml:" in template


FAMILY = dataclasses.replace(
    hermes.FAMILY,
    name="step",
    detect=_detect,
    openers=(hermes.START, OPENER, _TAGS.opener),
    read=_read,
    aliases=("step3", "step3p5", "step3_5"),
    markers=(hermes.START, hermes.END, *_IGNORED),
    ignored=_IGNORED,
    prefix_suffix=None,
)
