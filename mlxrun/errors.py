"""The one tree of errors; front ends turn them into exit codes, HTTP statuses and error records.

MlxrunError                exit 3  http 500  anything that mlxrun says on purpose
|- ConfigError             exit 2            a config file, variable or flag is wrong
|- JobError                exit 2            a job file, its output or its journal cannot be used
|- ModelLoadError          exit 3  http 503  the model cannot be loaded, or a library is too old
|- RequestError            exit 1  http 400  this request cannot be served; no other is touched
|  |- PromptTooLong                          prompt and answer do not fit the context
|  `- MediaError                             an image is missing, refused or not an image
|- Overloaded              exit 3  http 429  the queue is full; the same request may be sent again
`- EngineDead              exit 3  http 503  the engine has stopped; nothing more is served
"""

from __future__ import annotations


class MlxrunError(Exception):
    """Base of every error that mlxrun raises on purpose; its text is meant for the user."""

    exit_code = 3
    http_status = 500
    code = "internal_error"


class ConfigError(MlxrunError):
    """A config is wrong. The text holds every problem found, one a line."""

    exit_code = 2
    http_status = 400
    code = "invalid_config"


class JobError(MlxrunError):
    """A job cannot start or go on: its file, its output folder or its journal is unusable."""

    exit_code = 2
    code = "invalid_job"


class ModelLoadError(MlxrunError):
    """The model folder cannot be loaded here."""

    http_status = 503
    code = "model_load_failed"


class RequestError(MlxrunError):
    """One request cannot be served as it was sent.

    `param` is the path of the offending field in the request body (`messages[2].content`), or None.
    """

    exit_code = 1
    http_status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class PromptTooLong(RequestError):
    """The prompt, or prompt plus answer, is longer than what the model or the memory can hold."""

    code = "context_length_exceeded"


class MediaError(RequestError):
    """An image is missing, too large, not an image, or outside what the config allows."""

    code = "invalid_image"


class Overloaded(MlxrunError):
    """The queue is full. Nothing was started."""

    http_status = 429
    code = "overloaded"


class EngineDead(MlxrunError):
    """The engine thread has ended; the cause is chained."""

    http_status = 503
    code = "engine_unavailable"
