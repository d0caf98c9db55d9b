"""What turns request bodies into token ids, for one model. Each front end makes one."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.api.parsers.model_formats import ModelFormats
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import check_template
from mlxrun.api.text.templates.template_support import inspect_template
from mlxrun.config.settings import Config


@dataclass(frozen=True, slots=True)
class ApiContext:
    """`media_loader` decides which images may be read; `formats` how answers are parsed. The chat template is
    asked what it renders, which is when a model is loaded; raises ModelLoadError if it is broken."""

    model_info: ModelInfo
    config: Config
    media_loader: MediaLoader
    formats: ModelFormats = ModelFormats()

    def __post_init__(self) -> None:
        check_template(self.model_info, self.config.model.chat_template)
        inspect_template(self.model_info)
