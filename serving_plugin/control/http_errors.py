"""Errors over HTTP, in one place, shaped as vLLM's `ErrorResponse`: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from serving_plugin.core.errors import OverloadedError, TetriError

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def error_body(message: str, error_type: str, param: str | None, code: int) -> dict[str, Any]:
    """One error in OpenAI's shape, as vLLM 0.32 fills it."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


@web.middleware
async def translate_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into an error answer; the process and its other requests go on."""
    try:
        return await handler(request)
    except TetriError as error:
        headers = {"Retry-After": str(_RETRY_AFTER_S)} if isinstance(error, OverloadedError) else {}
        body = error_body(str(error), error.openai_type, error.param, error.http_status)
        return web.json_response(body, status=error.http_status, headers=headers)
    except web.HTTPException as error:
        phrase = HTTPStatus(error.status).phrase
        message = f"{phrase}: {request.method} {request.path}"
        body = error_body(message, f"{phrase.title().replace(' ', '')}Error", None, error.status)
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return web.json_response(body, status=error.status, headers=headers)
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        body = error_body("internal error, see the gateway's log", "InternalServerError", None, 500)
        return web.json_response(body, status=500)
