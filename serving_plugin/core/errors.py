"""One error tree. Translated to HTTP once, in the gateway; to exit code 2 once, in the CLI.

    TetriError
    ├── ConfigurationError   a setting, file or model is wrong: exit code 2, HTTP 400
    ├── BadRequestError      the client's request is wrong: 400
    │   └── ModelNotFoundError   the request names a model that nobody serves: 404
    ├── OverloadedError      back-pressure reached the front door: 429
    ├── NoInstanceError      nobody can take the request now: 503
    ├── LostInstanceError    an instance went away under a request: 502
    └── TransferFailedError  the KV cache did not arrive: 502

A message names the value, the limit and the cure, in one line.
"""

from __future__ import annotations


class TetriError(Exception):
    """Root of every error that a user may see; `str()` is one clear line."""

    http_status = 500
    openai_type = "InternalServerError"  # vLLM 0.32's own names, so that a client sees one dialect
    param: str | None = None  # the request's field that is wrong, if one is


class ConfigurationError(TetriError):
    """A setting, path, model or policy name is wrong."""

    http_status = 400
    openai_type = "BadRequestError"


class BadRequestError(TetriError):
    """A client's request is malformed or cannot ever be served. `param`: the field at fault, for the client."""

    http_status = 400
    openai_type = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(BadRequestError):
    """The request names a model that no instance serves."""

    http_status = 404
    openai_type = "NotFoundError"


class OverloadedError(TetriError):
    """Every queue that could take the request is full."""

    http_status = 429
    openai_type = "RateLimitError"


class NoInstanceError(TetriError):
    """No READY instance of the needed role is connected."""

    http_status = 503
    openai_type = "ServiceUnavailableError"


class LostInstanceError(TetriError):
    """The instance serving the request was lost before it finished."""

    http_status = 502
    openai_type = "BadGatewayError"


class TransferFailedError(TetriError):
    """The KV cache could not be moved and was not recomputed."""

    http_status = 502
    openai_type = "BadGatewayError"
