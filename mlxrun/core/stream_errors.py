"""Names the stream in the error of a write to it: on a full disk, or if its reader has gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def name_stream(stream: object) -> Iterator[None]:
    """Give an OSError of the block, which has no path in it, the name of the stream."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = "standard error" if stream is sys.__stderr__ else "standard output"
        raise
