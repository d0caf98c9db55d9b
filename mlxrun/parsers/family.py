"""What a format of calls, or of thoughts, is to the machine: one record each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxrun.parsers.text_stream import Step, TextStream

Reader = Callable[[TextStream, str], Step[None]]
Detect = Callable[[str, frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class ToolCallFamily:
    """A format of tool calls.

    `openers` begin a call anywhere in the text; `read` is given the stream behind one, and the opener.
    `start` is tried, with "" as opener, where text begins: formats without an opener. Both settle a call
    (`stream.call`), or return having read for nothing: then the opener is text and what follows it is read
    again. `whole` takes the place of all that, and of the thinking family: formats of one piece.
    """

    name: str
    detect: Detect  # chat template, texts of all added tokens
    openers: tuple[str, ...] = ()
    read: Reader | None = None
    start: Reader | None = None
    whole: Callable[[TextStream], Step[None]] | None = None
    drops: tuple[str, ...] = ()  # markers that mean nothing where text is, and are left out
    # Whether a call ends a thought that was never closed: openers are special tokens, which nobody writes in
    # passing.
    ends_thought: bool = False
    # Makes of a new id (`call_` and hexadecimal digits) one that the template takes.
    own_id: Callable[[str], str] | None = None
    aliases: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()  # special tokens whose text the parser must see
    # Text around the JSON of the arguments of a call, for a grammar; None: no JSON format.
    frame: Callable[[str], tuple[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """A format of thoughts: `pairs` of what opens one and what may end it.

    `anywhere`: an opener is one also in the middle of text (special tokens); else only where text, or what
    follows a thought or a call, begins. `opened`: whether a prompt leaves a thought open.
    """

    name: str
    detect: Detect
    pairs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    anywhere: bool = False
    opened: Callable[[str], bool] = lambda prompt: False
    whole: Callable[[TextStream], Step[None]] | None = None
    drops: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    closing: str = ""  # what to write to end a thought early, as the template ends one
    span: tuple[str, tuple[str, ...]] | None = None  # of a format of one piece: what begins and may end one

    @property
    def bounds(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What begins a thought, and what may end it, in any format."""
        return self.pairs or ((self.span,) if self.span is not None else ())

    @property
    def ends(self) -> tuple[str, ...]:
        """All that may end a thought; empty for a format of one piece."""
        return tuple(dict.fromkeys(end for _, ends in self.pairs for end in ends))
