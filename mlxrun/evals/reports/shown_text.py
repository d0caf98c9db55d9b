"""Texts of models and data sets, made safe to show: invisible characters are marked, and markup stays
text.
"""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from mlxrun.jobs.scoring.measure import SHARE

# Control characters, and those that change the direction or the look of others without being seen. Zero-width
# joiners stay, as emoji and some scripts need them. text.js has the same list.
_INVISIBLE = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|~#])")


def mark_invisible(text: str) -> str:
    """Replace each invisible character by a mark such as `[U+202E]`."""
    return _INVISIBLE.sub(lambda found: f"[U+{ord(found[0]):04X}]", text)


def show_html(text: object) -> Markup:
    """Return a text as HTML, isolated from the direction of the text around it."""
    if isinstance(text, Markup):
        return text
    parts, end, plain = [], 0, str(text)
    for found in _INVISIBLE.finditer(plain):
        parts += [escape(plain[end : found.start()]), Markup('<span class="unseen">')]
        parts += [escape(f"U+{ord(found[0]):04X}"), Markup("</span>")]
        end = found.end()
    return Markup("<bdi>{}</bdi>").format(Markup("").join([*parts, escape(plain[end:])]))


def escape_markdown(text: str) -> str:
    """Escape a text, so that Markdown shows it as it is."""
    return _MARKDOWN.sub(r"\\\1", mark_invisible(text))


def show_markdown(text: str, most: int = 200) -> str:
    """Return a text as one line of Markdown that may stand in a table, cut to `most` characters."""
    line = " ".join(text.split())
    return escape_markdown(line if len(line) <= most else line[: most - 1] + "…")


def format_count(number: int) -> str:
    """Format 12345 as `12,345`."""
    return f"{number:,}"


def format_share(share: float) -> str:
    """Format 0.872 as `87.2 %`."""
    return style_numbers(SHARE.format(share))


def style_numbers(text: str) -> str:
    """Give numbers a real minus sign, and a percent sign that stays in their line."""
    return text.replace("-", "\N{MINUS SIGN}").replace(" %", "\N{NO-BREAK SPACE}%")


def pluralize_count(number: int, noun: str) -> str:
    """Format `1 line` or `1,200 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
