"""GLM 4.5 to 4.7: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`.

4.5 and 4.6 write newlines between the tags, 4.7 none. Strings are written as they are, all else as JSON.
Within the tags JSON is read too.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.parsers.families.minimax import next_tag
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.json_call import read_calls
from mlxrun.parsers.readers.tagged_arguments import read_tagged
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream


@dataclass(frozen=True, slots=True)
class PairTags:
    """The tags of a format that pairs keys and values, by what stands before their common names."""

    prefix: str = ""

    @property
    def start(self) -> str:
        return f"<{self.prefix}tool_call>"

    @property
    def end(self) -> str:
        return f"</{self.prefix}tool_call>"

    @property
    def key(self) -> str:
        return f"<{self.prefix}arg_key>"

    @property
    def value(self) -> str:
        return f"<{self.prefix}arg_value>"

    @property
    def all(self) -> tuple[str, ...]:
        """All six."""
        both = (self.key, self.value)
        return (self.start, self.end, *both, *(closing(tag) for tag in both))


def closing(tag: str) -> str:
    """The tag that ends what `tag` begins."""
    return "</" + tag[1:]


def read_pairs(s: TextStream, tags: PairTags) -> Step[None]:
    """What stands behind `tags.start`, with the end tag. Raises Malformed if the tool is not offered."""
    if (yield from s.skip_space()) in ("{", "["):
        if not (yield from read_calls(s)):
            return
        yield from s.skip_space()
        yield from s.take_literal(tags.end)
        return
    name, tag = yield from s.read_name("\n", tags.key, tags.end)
    if name.strip() not in s.tools:
        raise Malformed
    call = s.begin_call(name.strip())
    ends = get_scanner(closing(tags.value))
    while tag != tags.end:
        if tag != tags.key and (yield from next_tag(s, tags.key, tags.end)) == tags.end:
            break
        key, end = yield from s.read_name(closing(tags.key))
        if not end:
            raise StreamCut
        yield from next_tag(s, tags.value)
        yield from read_tagged(s, call, key.strip(), ends, layout=False, guess=True)
        tag = ""
    call.close()


_TAGS = PairTags()


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from read_pairs(s, _TAGS)


FAMILY = ToolCallFamily(
    name="glm",
    detect=lambda template, tokens: _TAGS.key in template,
    openers=(_TAGS.start,),
    read=_read,
    ends_reasoning=True,
    aliases=("glm45", "glm4_moe", "glm47", "laguna"),
    markers=_TAGS.all,
)
