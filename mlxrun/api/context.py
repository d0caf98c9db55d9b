"""What turns request bodies into token ids, for one model. Each front end makes one."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.config.settings import Config
from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.text.images import MediaLoader
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import check_template


@dataclass(frozen=True, slots=True)
class ApiContext:
    """`media_loader` decides which images may be read; `formats` how answers are parsed. Raises
    ModelLoadError if the chat template is broken, so that it is found when a model is loaded."""

    model_info: ModelInfo
    config: Config
    media_loader: MediaLoader
    formats: ModelFormats = ModelFormats()

    def __post_init__(self) -> None:
        check_template(self.model_info, self.config.model.chat_template)
