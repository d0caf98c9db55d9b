"""DeepSeek V4 and V4.1: V3.2's tags in a block of another name, `<｜DSML｜tool_calls>` or `<｜DSML｜ calls>`.

The names of V4.1's tags begin with a space: `<｜DSML｜ invoke name="f"><｜DSML｜ parameter name="k"
string="true">`. One reader reads both, and the blocks of all versions are ignored wherever they stand. The
formats are those of `encoding_dsv4.py` and its successor, which come with the models.
"""

from __future__ import annotations

import re

from mlxrun.api.parsers.family import Detector, ToolCallFamily
from mlxrun.api.parsers.readers.invoke_tags import InvokeTags
from mlxrun.api.parsers.text_stream import Step, TextStream

PREFIX = "｜DSML｜"
BLOCKS = tuple(
    f"<{slash}{PREFIX}{name}>" for name in ("tool_calls", " calls", "function_calls") for slash in ("", "/")
)
_V4, _V41 = InvokeTags(PREFIX, *BLOCKS), InvokeTags(PREFIX + " ", *BLOCKS)
_TAGS = {tags.opener: tags for tags in (_V4, _V41)}
_SPACED = re.compile(rf"""(?:{PREFIX}|['"]) (?:calls>|invoke name=)""")
# Tokens that came with a version, by which a model is known whose template has no tools.
_NEW_TOKENS = {"4.1": "<｜System｜>", "4": "<｜latest_reminder｜>"}


def find_version(template: str, tokens: frozenset[str]) -> str:
    """Find the version whose tags a model writes: "3.2", "4" or "4.1"; "" if it writes none of them."""
    if PREFIX in template:
        return "4.1" if _SPACED.search(template) else "4" if "tool_calls>" in template else "3.2"
    if PREFIX in tokens:
        return next((version for version, token in _NEW_TOKENS.items() if token in tokens), "3.2")
    return ""


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from _TAGS[opener].read(s)


def _make_family(version: str, block: str, tags: InvokeTags) -> ToolCallFamily:
    detect: Detector = lambda template, tokens: find_version(template, tokens) == version  # noqa: E731
    number = version.replace(".", "")
    return ToolCallFamily(
        name=f"deepseek_v{number}",
        detect=detect,
        openers=tuple(_TAGS),
        read=_read,
        ignored=BLOCKS,
        ends=(_V4.close, _V41.close),
        ends_reasoning=True,
        aliases=() if number == version else (f"deepseek_v{version.replace('.', '_')}",),
        markers=(PREFIX, *BLOCKS),
        # With the arguments as JSON, which the tags may hold in place of parameters.
        prefix_suffix=lambda name: (
            f'\n\n<{PREFIX}{block}>\n{tags.opener}"{name}">\n',
            f"\n{tags.close}\n</{PREFIX}{block}>",
        ),
    )


FAMILIES = (_make_family("4.1", " calls", _V41), _make_family("4", "tool_calls", _V4))
