"""rich's console for text with parts of files in it. Control characters are visible, and only its own styles
apply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mlxrun.core import visible_text
from mlxrun.core.visible_text import name_stream


class VisibleConsole(Console):
    """A console whose texts cannot move the cursor, nor style or end a line."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does. An OSError gets the name of the stream."""
        with name_stream(self.file):
            super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as one line of styled text, also in the cell of a table."""
        return super().render_str(visible_text.make_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of a renderable, such as a text that was styled elsewhere."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible_text.make_visible(segment.text), segment.style)
