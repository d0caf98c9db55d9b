"""All errors of mlxrun. Front ends turn them into exit codes, HTTP statuses and error objects.

MlxrunError                exit 3  http 500  base class of all errors that mlxrun raises on purpose
|- ConfigError             exit 2            a config file, variable or flag is wrong
|- JobError                exit 2            a job file, its output or its journal cannot be used
|  `- DiskFailed           exit 3            the disk is full, or broken, so that nothing can be written to it
|- ModelLoadError          exit 3  http 503  the model cannot be loaded, or a library is too old
|- RequestError            exit 1  http 400  one request cannot be served; no other is affected
|  |- PromptTooLong                          prompt and answer do not fit the context
|  |  `- OutOfMemory                         they fit the context, but never the memory of this machine
|  |- MediaError                             an image, PDF, video or audio is missing or broken
|  |- Unauthorized                 http 401  the API key is missing or wrong
|  |- Forbidden                    http 403  the host or origin is not allowed
|  |- NotFound                     http 404  there is no such path, model or object
|  |- MethodNotAllowed             http 405  the path has other methods
|  |- BodyTooLarge                 http 413  the body is larger than the server accepts
|  |- WrongContentType             http 415  the body is not of the type that the path takes
|  |- WrongContentEncoding         http 415  the body is encoded in a way that the server does not decode
|  `- InternalError                http 500  mlxrun or the model failed on this request
|- Cancelled               exit 3  http 499  the request was cancelled
|- TimedOut                exit 3  http 504  the request took longer than allowed
|- Overloaded              exit 3  http 429  the queue is full; the same request may be sent again
|  `- RateLimited                            the API key of the request is at one of its limits
|- NotReady                exit 3  http 503  the model is being loaded
|- Draining                exit 3  http 503  the server is about to stop
`- EngineDead              exit 3  http 503  the engine has stopped, and serves nothing more
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any, Self

MAX_MESSAGE = 2_000  # bytes of a message in UTF-8
_NOTE_BYTES = 60  # of the note that a message was cut


class MlxrunError(Exception):
    """Base class of all errors that mlxrun raises on purpose. The text is meant for the user."""

    exit_code = 3
    http_status = 500
    code = "internal_error"
    retry_after: int | None = None  # seconds after which the same request may succeed
    problems: tuple[str, ...] = ()  # the parts of a text that lists several problems, one a line

    @classmethod
    def from_problems(cls, problems: Iterable[str]) -> Self:
        """An error that lists these problems, one a line, each once."""
        listed = tuple(dict.fromkeys(problems))
        error = cls("\n".join(listed))
        error.problems = listed
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error without its cause, for other processes."""
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigError(MlxrunError):
    """A config is wrong. The text lists all problems, one per line (`problems`)."""

    exit_code = 2
    http_status = 400
    code = "invalid_config"


class JobError(MlxrunError):
    """A job cannot start or continue: its file, its output folder or its journal is unusable."""

    exit_code = 2
    code = "invalid_job"


class DiskFailed(JobError):
    """The disk of a job is full or broken. The job itself is not at fault."""

    exit_code = 3
    code = "disk_failed"


class ModelLoadError(MlxrunError):
    """The model folder cannot be loaded on this machine."""

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


class OutOfMemory(PromptTooLong):
    """Prompt and answer fit the context, but never the memory of this machine. A client sees it as a shorter
    context: it must send less, and a retry does not help."""


class MediaError(RequestError):
    """An image, PDF, video or audio is missing, too large, broken, or not allowed by the config. Others than
    images have codes of their own: `invalid_document`, `invalid_video`, `invalid_audio`."""

    code = "invalid_image"


class Unauthorized(RequestError):
    """The request has no API key, or an unknown one."""

    http_status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The host or origin of the request is not allowed."""

    http_status = 403
    code = "forbidden"


class NotFound(RequestError):
    """There is no such path, model or object."""

    http_status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path has no such method. `methods`: the methods that it has."""

    http_status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, methods: Collection[str]) -> None:
        super().__init__(message)
        self.methods = tuple(sorted(methods))


class BodyTooLarge(RequestError):
    """The body is larger than the server accepts."""

    http_status = 413
    code = "request_too_large"


class WrongContentType(RequestError):
    """The Content-Type of the body is not one that the path takes."""

    http_status = 415
    code = "unsupported_content_type"


class WrongContentEncoding(RequestError):
    """The Content-Encoding of the body is not one that the server decodes."""

    http_status = 415
    code = "unsupported_content_encoding"


class InternalError(RequestError):
    """mlxrun or the model failed on one request; `cause` is the reason."""

    http_status = 500
    code = "internal_error"

    def __init__(self, message: str, cause: BaseException, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.__cause__ = cause


class Cancelled(MlxrunError):
    """The request was cancelled while it ran."""

    http_status = 499  # as in nginx; clients do not retry it
    code = "request_cancelled"


class TimedOut(MlxrunError):
    """The request took longer than allowed, and was aborted."""

    http_status = 504
    code = "request_timeout"


class Overloaded(MlxrunError):
    """The queue is full. Nothing was started."""

    http_status = 429
    code = "overloaded"
    retry_after = 1


class RateLimited(Overloaded):
    """The API key of the request is at one of its limits. `seconds`: until the same request may succeed."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(seconds))


class NotReady(MlxrunError):
    """The model is being loaded. Nothing was started."""

    http_status = 503
    code = "loading"
    retry_after = 5


class Draining(MlxrunError):
    """The server is about to stop. Nothing was started, unless the message says so."""

    http_status = 503
    code = "shutting_down"
    retry_after = 5

    def __init__(self, message: str = "the server is shutting down: try again soon") -> None:
        super().__init__(message)


class EngineDead(MlxrunError):
    """The engine thread has ended; the cause is chained."""

    http_status = 503
    code = "engine_unavailable"
    retry_after = 5


def _rebuild(cls: type[MlxrunError], args: tuple[Any, ...], fields: dict[str, Any]) -> MlxrunError:
    """An error of another process, whatever its class takes as arguments."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(fields)
    return error


def get_http_status(error: BaseException) -> int:
    """The HTTP status of any error."""
    return error.http_status if isinstance(error, MlxrunError) else 500


def shorten_message(text: str) -> str:
    """The text in at most MAX_MESSAGE bytes. A longer text is cut in its middle and says so: its beginning
    names the place of an error, its end may name the reason."""
    data = text.encode(errors="surrogatepass")
    if len(data) <= MAX_MESSAGE:
        return text
    side = (MAX_MESSAGE - _NOTE_BYTES) // 2
    head, tail = (part.decode(errors="ignore") for part in (data[:side], data[-side:]))
    return f"{head} ... ({len(text) - len(head) - len(tail):,} characters left out) ... {tail}"


def describe_error(error: BaseException) -> str:
    """The text of an error for the user. A bug is described by its class only, since its text may contain
    anything."""
    known = isinstance(error, MlxrunError)
    return shorten_message(str(error)) if known else f"internal error ({type(error).__name__})"


_SHORTAGES = (
    "out of memory",
    "outofmemory",
    "insufficient memory",
    "unable to allocate",
    "attempting to allocate",
    "cannot allocate memory",
    "bad_alloc",
    "can't start new thread",  # whose stack has no room
    "resource temporarily unavailable",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or this process has no memory left."""
    return isinstance(error, MemoryError) or any(text in str(error).lower() for text in _SHORTAGES)


def wrap_model_error(error: Exception) -> MlxrunError:
    """The error that a client gets for an exception that the model raised on its request."""
    if isinstance(error, MlxrunError):
        return error
    text = f"the model failed on this request: {type(error).__name__}: {error}"
    return InternalError(text, error, code="model_error")
