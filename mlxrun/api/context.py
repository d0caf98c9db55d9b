"""Everything that turns a request body into token ids, for one model: made once by each front end."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.config.settings import Config
from mlxrun.text.formats import PLAIN, AnswerFormats
from mlxrun.text.images import MediaLoader
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import check_template


@dataclass(frozen=True, slots=True)
class ApiContext:
    """`loader` decides which images may be read; `formats` how answers are split. ModelLoadError if the chat
    template is broken."""

    host: ModelInfo
    config: Config
    loader: MediaLoader
    formats: AnswerFormats = PLAIN

    def __post_init__(self) -> None:
        """What is wrong with a chat template is found when a model is loaded, not at the first request."""
        check_template(self.host, self.config.model.chat_template)
