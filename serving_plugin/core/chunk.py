"""Chunk: how many prompt tokens a step takes, and of which prompts. Pure arithmetic; standard library only.

Definitions: docs/definitions.md, "Order and chunks on a prefill instance". Source: TetriInfer 3.3.3; the paper pads the
last chunk of a batch, we do not: a padded token is work for nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serving_plugin.core.errors import ConfigurationError

ChunkPolicy = Callable[[Sequence[int], int], list[int]]


def fixed(prompt_tokens_left: Sequence[int], chunk_tokens: int) -> list[int]:
    """Tokens of each prompt in the next chunk: filled in order, the last prompt sliced where the chunk is full.

    The sum is min(chunk_tokens, sum(prompt_tokens_left)), so repeated chunks conserve tokens.

    Raises:
        ConfigurationError: `chunk_tokens` is below 1.
        ValueError: A prompt has a negative number of tokens left.
    """
    _check_chunk(chunk_tokens)
    room = chunk_tokens
    scheduled = []
    for left in prompt_tokens_left:
        if left < 0:
            raise ValueError(f"a prompt has {left} tokens left: must be 0 or more")
        scheduled.append(min(left, room))
        room -= scheduled[-1]
    return scheduled


def step_token_budget(num_decode_tokens: int, chunk_tokens: int, max_num_batched_tokens: int) -> int:
    """Tokens a step may schedule: its decodes plus one chunk of prompt tokens, within the engine's own limit.

    Raises:
        ConfigurationError: `chunk_tokens` is below 1.
    """
    _check_chunk(chunk_tokens)
    return min(num_decode_tokens + chunk_tokens, max_num_batched_tokens)


def _check_chunk(chunk_tokens: int) -> None:
    if chunk_tokens < 1:
        raise ConfigurationError(f"chunk.chunk_tokens={chunk_tokens}: a chunk must hold 1 token or more")


CHUNK_POLICIES: dict[str, ChunkPolicy] = {"fixed": fixed}
