"""Everything that turns a request body into token ids, for one model: made once by each front end."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.config.settings import Config
from mlxrun.text.formats import PLAIN, Formats
from mlxrun.text.host import HostModel
from mlxrun.text.media import MediaLoader


@dataclass(frozen=True, slots=True)
class TextSide:
    """`loader` decides which images may be read; `formats` how answers are split."""

    host: HostModel
    config: Config
    loader: MediaLoader
    formats: Formats = PLAIN
