"""Bypass: which requests run whole on one instance rather than split. Pure functions; standard library only.

Two different questions: `whole_reason` says what *cannot* be split without changing the answer, a bypass policy what is
better not split. Definitions: docs/definitions.md, "Whole or split".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from serving_plugin.core.types import InstanceLoad, RequestInfo

BypassPolicy = Callable[[RequestInfo, Sequence[InstanceLoad]], bool]


def never(request: RequestInfo, loads: Sequence[InstanceLoad] = ()) -> bool:
    """Split whatever can be split."""
    return False


BYPASS_POLICIES: dict[str, BypassPolicy] = {"never": never}

# Content parts that vLLM 0.32 turns into plain prompt text (`vllm/renderers/chat_utils.py`, MM_PARSER_MAP).
TEXT_PART_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})


def whole_reason(body: Mapping[str, object], is_chat: bool) -> str | None:
    """Why an OpenAI request body cannot be split faithfully, as a stable snake_case word; None if it can.

    Judges only what it understands: values of a wrong type are left to vLLM, which refuses them with a better message.
    """
    checks: tuple[tuple[str, bool], ...] = (
        ("n", _over_one(body.get("n"))),
        ("best_of", _over_one(body.get("best_of"))),
        ("beam_search", bool(body.get("use_beam_search"))),
        ("echo", bool(body.get("echo"))),
        ("prompt_logprobs", body.get("prompt_logprobs") is not None),
        ("prompt_embeds", body.get("prompt_embeds") is not None),
        ("several_prompts", not is_chat and _several(body.get("prompt"))),
        ("one_token", _asks_one_token(body, is_chat)),
        ("multimodal", is_chat and _any_part_but_text(body.get("messages"))),
    )
    return next((reason for reason, holds in checks if holds), None)


def _over_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _several(prompt: object) -> bool:
    """Whether `prompt` is a list of two or more prompts; a flat list of token ids is one prompt."""
    return isinstance(prompt, list) and len(prompt) > 1 and any(isinstance(item, str | list) for item in prompt)


def _asks_one_token(body: Mapping[str, object], is_chat: bool) -> bool:
    """Whether the prefill instance's one token is all that is asked for: nothing is left to decode elsewhere."""
    limit = body.get("max_completion_tokens") if is_chat else None  # the newer name wins, as in vLLM
    if limit is None:
        limit = body.get("max_tokens")
    return isinstance(limit, int) and not isinstance(limit, bool) and limit == 1


def _any_part_but_text(messages: object) -> bool:
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and not _is_text(part) for part in parts)


def _is_text(part: Mapping[object, object]) -> bool:
    # vLLM also takes parts without a type and goes by their keys.
    return part.get("type") in TEXT_PART_TYPES if "type" in part else set(part) <= {"text", "refusal"}
