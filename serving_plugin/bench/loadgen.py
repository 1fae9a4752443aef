"""Open-loop load over OpenAI's streaming completions: what a client sees, token by token.

Every request becomes one `RequestRecord`, whatever happens to it: errors, refusals and timeouts are outcomes, never
exceptions. Times are the client's, in unix seconds on one monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import aiohttp

from serving_plugin.bench.workloads import BenchRequest
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import Outcome, RequestRecord

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_QUERY_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 300


class Lengths(StrEnum):
    """Who ends an output: `fixed` makes all systems do the same work, `natural` lets the model end it."""

    FIXED = "fixed"
    NATURAL = "natural"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where and how to send. Requests go round robin over `base_urls` in order of arrival.

    `request_timeout_s` bounds one request from send to last token. `max_output_tokens` caps natural lengths.
    `instance_names` label the URLs in records of servers that do not record requests themselves.
    """

    base_urls: tuple[str, ...]
    model: str
    lengths: Lengths = Lengths.FIXED
    max_output_tokens: int = 256
    temperature: float = 0.0
    request_timeout_s: float = 600.0
    id_prefix: str = "bench"
    instance_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.base_urls:
            raise ConfigurationError("no server to send to; give --base-url")
        for url in self.base_urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigurationError(f"--base-url {url!r} is not an http(s) URL, such as http://127.0.0.1:8000")
        if self.request_timeout_s <= 0:
            raise ConfigurationError(f"--request-timeout-s {self.request_timeout_s} is not above 0")

    def instance_name(self, index: int) -> str:
        """Name of the server behind `base_urls[index]`."""
        return self.instance_names[index] if self.instance_names else self.base_urls[index]


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a run, sent to the progress callback whenever a request is sent, gets its first token or ends."""

    num_total: int
    num_sent: int
    num_first_tokens: int
    num_done: int
    num_failed: int


class UnixClock:
    """Unix seconds that never step back: read once, then advanced by the monotonic clock."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


@dataclass(slots=True)
class _Stream:
    """What has come of one request so far."""

    token_times_s: list[float] = field(default_factory=list)
    usage_tokens: int | None = None
    last_running_usage: int = 0
    is_done: bool = False
    error: str | None = None
    outcome: Outcome = Outcome.ERROR


@dataclass(slots=True)
class _Counts:
    total: int
    sent: int = 0
    first_tokens: int = 0
    done: int = 0
    failed: int = 0


async def run_load(
    requests: Sequence[BenchRequest],
    options: LoadOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] | None = None,
) -> list[RequestRecord]:
    """Send every request at its time and return one record each, in order of arrival.

    The run ends at the latest `request_timeout_s` after the last arrival.
    """
    now_s = clock or UnixClock()
    ordered = sorted(requests, key=lambda r: r.arrival_s)
    counts = _Counts(len(ordered))

    def report() -> None:
        on_progress(Progress(counts.total, counts.sent, counts.first_tokens, counts.done, counts.failed))

    # A fresh connection each time: uvicorn closes idle ones after 5 s, and a request written into that is lost.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=options.request_timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start_s = now_s()

        async def send(index: int, request: BenchRequest) -> RequestRecord:
            await asyncio.sleep(max(0.0, start_s + request.arrival_s - now_s()))
            counts.sent += 1
            report()

            def on_first_token() -> None:
                counts.first_tokens += 1
                report()

            record = await _send_one(session, request, options, index, now_s, on_first_token)
            counts.done += 1
            counts.failed += record.outcome is not Outcome.OK
            report()
            return record

        return list(await asyncio.gather(*(send(i, r) for i, r in enumerate(ordered))))


def request_body(request: BenchRequest, options: LoadOptions) -> dict[str, Any]:
    """The OpenAI body. No `seed`: it kills vLLM's CPU engine."""
    is_fixed = options.lengths is Lengths.FIXED
    body: dict[str, Any] = {
        "model": options.model,
        "prompt": request.prompt,
        "max_tokens": request.num_output_tokens if is_fixed else options.max_output_tokens,
        "temperature": options.temperature,
        "stream": True,
        # Continuous: one event may carry several tokens when the client or the server lags behind.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return body | {"ignore_eos": True} if is_fixed else body


async def _send_one(
    session: aiohttp.ClientSession,
    request: BenchRequest,
    options: LoadOptions,
    index: int,
    now_s: Callable[[], float],
    on_first_token: Callable[[], None],
) -> RequestRecord:
    server = index % len(options.base_urls)
    request_id = f"{options.id_prefix}-{request.id}"
    url = options.base_urls[server].rstrip("/") + "/v1/completions"
    stream = _Stream()
    arrival_s = now_s()
    try:
        async with session.post(
            url, json=request_body(request, options), headers={"X-Request-Id": request_id}
        ) as response:
            if response.status != 200:
                stream.outcome = Outcome.REJECTED if response.status == 429 else Outcome.ERROR
                stream.error = f"HTTP {response.status}: {_error_text(await response.text())}"
            else:
                await _read_stream(response, stream, now_s, on_first_token)
    except TimeoutError:
        stream.error = f"no end within {options.request_timeout_s:g} s (--request-timeout-s)"
    except (aiohttp.ClientError, OSError) as error:
        stream.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    return _record_of(request, request_id, arrival_s, stream, options, server)


async def _read_stream(
    response: aiohttp.ClientResponse, stream: _Stream, now_s: Callable[[], float], on_first_token: Callable[[], None]
) -> None:
    async for data in sse_data(response):
        received_s = now_s()
        if data == "[DONE]":
            stream.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            stream.error = f"the stream holds no JSON: {data[:80]!r}"
            return
        if "error" in event:
            stream.error = _error_text(data)
            return
        had_tokens = bool(stream.token_times_s)
        stream.token_times_s += [received_s] * _num_new_tokens(event, stream)
        if stream.token_times_s and not had_tokens:
            on_first_token()
    stream.error = "the stream ended before [DONE]"


async def sse_data(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Data lines of a server-sent event stream; lines may be split anywhere between reads."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", errors="replace")


def _num_new_tokens(event: Mapping[str, Any], stream: _Stream) -> int:
    """Tokens that this event brought: by its running usage if it has one, else one for each non-empty text.

    The final usage event has no choices and brings none.
    """
    choices = event.get("choices") or []
    usage = event.get("usage") or {}
    running = usage.get("completion_tokens")
    if running is not None:
        stream.usage_tokens = int(running)
    if not choices:
        return 0
    has_text = bool(choices[0].get("text"))
    if running is None:
        return len(choices[0].get("token_ids") or ()) or int(has_text)
    num_new = int(running) - stream.last_running_usage
    stream.last_running_usage = int(running)
    # A front door that puts the first token in itself may leave its count to the next event: text is always a token.
    return max(num_new, int(has_text))


def _record_of(
    request: BenchRequest, request_id: str, arrival_s: float, stream: _Stream, options: LoadOptions, server: int
) -> RequestRecord:
    times_s = tuple(stream.token_times_s)
    num_output_tokens = len(times_s) if stream.usage_tokens is None else stream.usage_tokens
    outcome, error = stream.outcome, stream.error
    if stream.is_done:
        outcome, error = Outcome.OK, _length_fault(request, options, num_output_tokens, len(times_s))
        if error is not None and not error.startswith("note:"):
            outcome = Outcome.ERROR
    name = options.instance_name(server)
    return RequestRecord(
        id=request_id,
        arrival_s=arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        outcome=outcome,
        first_token_s=times_s[0] if times_s else None,
        last_token_s=times_s[-1] if times_s else None,
        prefill_instance=name,
        decode_instance=name,
        error=error,
        workload_class=request.workload_class,
        token_times_s=times_s,
    )


def _length_fault(request: BenchRequest, options: LoadOptions, num_output_tokens: int, num_seen: int) -> str | None:
    """Why a finished stream is not what was asked for; a mere difference in counting is a note."""
    if options.lengths is Lengths.FIXED and num_output_tokens != request.num_output_tokens:
        return f"asked for {request.num_output_tokens} tokens, got {num_output_tokens}"
    if num_seen == 0:
        return "the stream held no token"
    if num_seen != num_output_tokens:
        return f"note: {num_seen} tokens counted at the client, usage says {num_output_tokens}"
    return None


def _error_text(body: str) -> str:
    """The message of an OpenAI error body, or the body itself, on one line."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed)
        text = error.get("message", body) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        text = body
    return " ".join(str(text).split())[:_MAX_ERROR_CHARS]


async def _get_json(url: str) -> Any:
    """JSON of `url`, or None when the server has no such route."""
    timeout = aiohttp.ClientTimeout(total=_QUERY_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise ConfigurationError(
            f"{url} does not answer ({type(error).__name__}: {error}); is the server up?"
        ) from None


async def fetch_model_name(base_url: str) -> str:
    """Name of the first model that the server offers. Raises `ConfigurationError` when it does not answer."""
    listing = await _get_json(base_url.rstrip("/") + "/v1/models")
    try:
        return str(listing["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise ConfigurationError(f"{base_url}/v1/models names no model; give --served-model-name") from None


async def fetch_gateway_rows(base_url: str, limit: int) -> list[dict[str, Any]] | None:
    """The gateway's own records of its last `limit` requests; None from a server that is no gateway.

    Empty when it no longer answers: what was measured until then must not be lost with it.
    """
    try:
        listing = await _get_json(f"{base_url.rstrip('/')}/tetri/requests?limit={limit}")
    except ConfigurationError as error:
        logger.warning("no records of the gateway: %s", error)
        return []
    return list(listing["requests"]) if isinstance(listing, dict) and "requests" in listing else None


def merge_gateway_rows(records: Sequence[RequestRecord], rows: Sequence[Mapping[str, Any]]) -> list[RequestRecord]:
    """Client records completed with what only the gateway knows; the client's own times stay.

    A request without a row loses its instances: which ones served it is not known.
    """
    by_id = {str(row.get("id")): row for row in rows}
    return [_merged(record, by_id.get(record.id)) for record in records]


def _merged(record: RequestRecord, row: Mapping[str, Any] | None) -> RequestRecord:
    if row is None:
        return replace(record, prefill_instance=None, decode_instance=None)
    length_range = row.get("length_range")
    return replace(
        record,
        prefill_instance=row.get("prefill_instance"),
        decode_instance=row.get("decode_instance"),
        whole_reason=row.get("whole_reason"),
        length_range=LengthRange(length_range["low_tokens"], length_range["high_tokens"]) if length_range else None,
        prefill_start_s=row.get("prefill_start_s"),
        prefill_end_s=row.get("prefill_end_s"),
        forecast_ready_s=row.get("forecast_ready_s"),
        dispatch_s=row.get("dispatch_s"),
        transfer_start_s=row.get("transfer_start_s"),
        transfer_end_s=row.get("transfer_end_s"),
    )
