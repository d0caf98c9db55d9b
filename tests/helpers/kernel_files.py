"""What a compiler reads where the text of a kernel includes files."""

from __future__ import annotations

import re
from pathlib import Path

_INCLUDED = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


def expand_files(text: str, folder: Path = Path()) -> str:
    """The text with its included files in place of their lines, without comments of whole lines."""

    def read(found: re.Match[str]) -> str:
        path = folder / found[1]
        return expand_files(path.read_text(encoding="utf-8"), path.parent)

    return re.sub(r"^//.*\n", "", _INCLUDED.sub(read, text), flags=re.MULTILINE)
