"""The two legs of a split request: bodies (pure functions) and the client that sends them.

The prefill leg asks for one token and for the KV cache to be kept; its answer says where to decode. The decode leg is
the client's own body plus that answer. Source: vLLM 0.32's disaggregation over HTTP; docs/architecture.md.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from serving_plugin.core.errors import LostInstanceError, TransferFailedError
from serving_plugin.core.forecast import LengthRange
from serving_plugin.wire import COMPLETION_DEFAULT_MAX_TOKENS, LEG_HEADER, REQUEST_ID_HEADER, Leg

logger = logging.getLogger(__name__)

Body = dict[str, Any]

_RESERVED_XARGS_PREFIX = "tetri_"
_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")

# Fields that only mean something for the tokens that D puts out, with the plain types they may have. `seed` also kills
# vLLM's CPU engine under chunked prefill. P never sees them, so an odd value must not get as far as a split.
_DECODE_ONLY_FIELDS: dict[str, tuple[type, ...]] = {
    "stream": (bool,),
    "stream_options": (dict,),
    "stream_interval": (int,),
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "min_tokens": (int,),
    "ignore_eos": (bool,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "include_stop_str_in_output": (bool,),
    "logprobs": (int, bool),
    "top_logprobs": (int,),
    "logprob_token_ids": (list,),
    "response_format": (dict,),
    "structured_outputs": (dict,),
    "guided_json": (dict, str),
    "guided_regex": (str,),
    "guided_choice": (list,),
    "guided_grammar": (str,),
    "guided_decoding_backend": (str,),
    "guided_whitespace_pattern": (str,),
    "repetition_detection": (dict,),
    "thinking_token_budget": (int,),
    "seed": (int,),
}


class LegFailedError(LostInstanceError):
    """A leg got no answer from its instance, or a refusal that another instance may not give."""

    def __init__(self, message: str, instance_id: str) -> None:
        super().__init__(message)
        self.instance_id = instance_id


class LegTimeoutError(LostInstanceError):
    """A leg ran longer than `request_timeout_s`: never retried, it may still be running."""

    http_status = 504
    openai_type = "GatewayTimeoutError"


def strip_client_body(body: Mapping[str, Any]) -> Body:
    """The client's body without what only gateways may say (definitions: "Trust")."""
    clean = {key: value for key, value in body.items() if key not in _INTERNAL_FIELDS}
    xargs = clean.get("vllm_xargs")
    if isinstance(xargs, Mapping):
        clean["vllm_xargs"] = {
            key: value
            for key, value in xargs.items()
            if not key.startswith(_RESERVED_XARGS_PREFIX) and key not in _INTERNAL_FIELDS
        }
    return clean


def unchecked_field(body: Mapping[str, Any]) -> str | None:
    """Why a body cannot be split although it may look so: a decode-only field of an odd type or size.

    Such a request runs whole, so that vLLM itself answers it, before any KV cache is computed for it.
    """
    for name, kinds in _DECODE_ONLY_FIELDS.items():
        value = body.get(name)
        if value is not None and type(value) not in kinds:
            return f"odd_{name}"
    if body.get("stream_options") is not None and not body.get("stream"):
        return "odd_stream_options"
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and value < 1:
            return f"odd_{name}"
    return None


def client_max_tokens(body: Mapping[str, Any], is_chat: bool) -> int | None:
    """Output limit that the client's body implies; None: as far as the context goes."""
    limit: int | None = body.get("max_tokens", None if is_chat else COMPLETION_DEFAULT_MAX_TOKENS)
    if is_chat and body.get("max_completion_tokens") is not None:
        limit = body["max_completion_tokens"]
    return limit


def estimate_prompt_tokens(body: Mapping[str, Any], is_chat: bool) -> int:
    """Prompt length for placement only: exact for token ids, a fourth of the characters for text."""
    if is_chat:
        messages = body.get("messages")
        return _estimate_text(json.dumps(messages)) if isinstance(messages, list) else 1
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if prompt and all(isinstance(token, int) for token in prompt):
            return len(prompt)
        return max(1, sum(len(p) if isinstance(p, list) else _estimate_text(str(p)) for p in prompt))
    return _estimate_text(prompt) if isinstance(prompt, str) else 1


def prefill_body(
    body: Mapping[str, Any], is_chat: bool, request_id: str, arrival_s: float, exclude: Iterable[str] = ()
) -> Body:
    """What P is asked: one token whatever it is, and to keep the KV cache for whoever P's dispatcher chooses.

    `exclude`: instances that failed this request already, which the dispatcher must not choose again.
    """
    leg = {key: value for key, value in body.items() if key not in _DECODE_ONLY_FIELDS}
    leg.update(stream=False, ignore_eos=True, max_tokens=1)
    if is_chat:
        leg["max_completion_tokens"] = 1
    if leg.get("tools"):
        leg["tool_choice"] = "none"
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "tetri": {"request_id": request_id, "max_tokens": client_max_tokens(body, is_chat), "arrival_s": arrival_s},
    }
    if excluded := sorted(exclude):
        leg["kv_transfer_params"]["tetri"]["exclude"] = excluded
    return leg


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any], queued_since_s: float) -> Body:
    """What D is asked: the client's request, with P's word on where the KV cache is.

    `queued_since_s`: unix time of the request's first decode leg, so that one that was given back keeps its place.
    """
    tetri = {**kv_transfer_params["tetri"], "queued_since_s": queued_since_s}
    return {**body, "kv_transfer_params": {**kv_transfer_params, "tetri": tetri}}


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """P's answer: the reference to the KV cache, and its dispatcher's choice (`decode_url` None: `error` says why).

    `summaries`: what its length predictors said, unread; not part of `kv_transfer_params`, since D needs none of it.
    """

    kv_transfer_params: Body
    decode_id: str | None
    decode_url: str | None
    error: str | None
    length_range: LengthRange | None
    num_prompt_tokens: int | None
    times_s: Mapping[str, float]
    summaries: object = None
    can_ever_fit: bool = True


def parse_prefill_answer(raw: bytes, instance_id: str) -> PrefillAnswer:
    """Read P's answer.

    Raises:
        TransferFailedError: it carries no usable `kv_transfer_params`.
    """
    try:
        params = json.loads(raw)["kv_transfer_params"]
        tetri = params["tetri"]
        bounds = tetri.get("length_range")
        times = tetri.get("times") or {}
        return PrefillAnswer(
            kv_transfer_params=params,
            decode_id=tetri.get("decode_id"),
            decode_url=tetri.get("decode_url"),
            error=tetri.get("error"),
            length_range=LengthRange(*map(int, bounds)) if bounds else None,
            num_prompt_tokens=tetri.get("num_prompt_tokens"),
            times_s={name: float(at) for name, at in times.items() if at is not None},
            summaries=tetri.pop("summaries", None),
            can_ever_fit=tetri.get("can_ever_fit", True) is not False,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TransferFailedError(
            f"prefill instance {instance_id} answered without a usable kv_transfer_params.tetri ({error!r}): "
            f"start it with VLLM_PLUGINS=tetri, see `tetri instance --print`"
        ) from None


class LegClient:
    """Sends legs. Connects within `connect_timeout_s`; the whole leg is bounded by `request_timeout_s` alone, since a
    shorter limit would measure the peer's queue."""

    # uvicorn closes idle connections after 5 s: give ours back earlier, and expect to lose that race now and then.
    _KEEPALIVE_S = 3.0

    def __init__(
        self, connect_timeout_s: float, request_timeout_s: float, on_retry: Callable[[str], None] = lambda leg: None
    ) -> None:
        self._request_timeout_s = request_timeout_s
        self._on_retry = on_retry
        timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=connect_timeout_s)

        def session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                headers={"Accept-Encoding": "identity"},
                read_bufsize=1 << 18,
            )

        self._pooled = session(aiohttp.TCPConnector(limit=0, keepalive_timeout=self._KEEPALIVE_S))
        self._fresh = session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """Close every connection."""
        await self._pooled.close()
        await self._fresh.close()

    async def get_json(self, url: str, headers: Mapping[str, str], timeout_s: float) -> Any:
        """JSON behind a GET; raises aiohttp's errors."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._fresh.get(url, headers=headers, timeout=timeout, raise_for_status=True) as response:
            return await response.json()

    async def post_json(self, url: str, body: Body, headers: Mapping[str, str], timeout_s: float) -> Any:
        """JSON answer to a POST; raises aiohttp's errors."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._fresh.post(url, json=body, headers=headers, timeout=timeout, raise_for_status=True) as answer:
            return await answer.json()

    @asynccontextmanager
    async def post(
        self, instance_id: str, url: str, body: Body, leg: Leg, request_id: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a leg and hand out its answer once the headers are here.

        Leaving early closes the connection, and vLLM then aborts the request. The block must turn the client's own
        connection errors into something else than aiohttp's, or they would count as the instance's.

        Raises:
            LegFailedError: no connection, or it broke (before the answer or while the block reads it).
            LegTimeoutError: over `request_timeout_s`.
        """
        headers = {**headers, REQUEST_ID_HEADER: request_id, LEG_HEADER: leg.value}
        try:
            response = await self._send(url, body, leg, request_id, headers)
            try:
                yield response
            finally:
                if not response.content.at_eof():
                    response.close()
                response.release()
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise LegFailedError(
                    f"{leg} instance {instance_id} at {url} takes no connection", instance_id
                ) from None
            raise LegTimeoutError(
                f"{leg} leg on {instance_id} took over {self._request_timeout_s:.0f} s (request_timeout_s)"
            ) from None
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise LegFailedError(f"{leg} instance {instance_id} at {url} was lost: {reason}", instance_id) from None

    async def _send(
        self, url: str, body: Body, leg: Leg, request_id: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """One try on a pooled connection; if that broke before any answer, one on a fresh connection."""
        try:
            return await self._pooled.post(url, json=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            logger.info("%s: %s leg is sent again on a fresh connection (%r)", request_id, leg, error)
            self._on_retry(leg.value)
            return await self._fresh.post(url, json=body, headers=headers)


def _estimate_text(text: str) -> int:
    return max(1, len(text) // 4)
