"""Server-sent events on their way through: whole events only, counted but not changed. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

_END = b"\n\n"
_MAX_HELD_BYTES = 1 << 20


@dataclass(slots=True)
class EventMeter:
    """Passes events through and keeps what a request record needs.

    An event cut off by a lost instance is never passed on, so that an error event can follow in its place.
    """

    num_token_events: int = 0
    num_completion_tokens: int | None = None
    num_prompt_tokens: int | None = None
    done: bool = False
    error: str | None = None
    _held: bytes = field(default=b"", repr=False)

    def feed(self, chunk: bytes) -> bytes:
        """Bytes to pass on now: everything up to the last whole event."""
        held = self._held + chunk
        cut = held.rfind(_END) + len(_END)
        if cut < len(_END):
            cut = len(held) if len(held) > _MAX_HELD_BYTES else 0
        passed, self._held = held[:cut], held[cut:]
        for event in passed.split(_END):
            self._count(event)
        return passed

    def rest(self) -> bytes:
        """What is left after the stream ended properly."""
        rest, self._held = self._held, b""
        return rest

    def _count(self, event: bytes) -> None:
        if not event.startswith(b"data:"):
            return
        data = event[5:].strip()
        if data == b"[DONE]":
            self.done = True
        elif data.startswith(b'{"error"'):
            self.error = _error_message(data)
        else:
            if b'"usage":{' in data:
                self._read_usage(data)
            if b'"choices":[{' in data and not _is_role_only(data):
                self.num_token_events += 1

    def _read_usage(self, data: bytes) -> None:
        try:
            usage = json.loads(data)["usage"]
            self.num_completion_tokens = int(usage["completion_tokens"])
            self.num_prompt_tokens = int(usage["prompt_tokens"])
        except (ValueError, KeyError, TypeError):
            return  # not the server's own usage object, e.g. text that quotes one

    @property
    def num_output_tokens(self) -> int:
        """Output tokens: from usage if the stream had it, else one per event with choices."""
        return self.num_token_events if self.num_completion_tokens is None else self.num_completion_tokens


def _is_role_only(data: bytes) -> bool:
    """vLLM's first chat event: a role and no text."""
    return b'"delta":{"role":"assistant","content":""' in data


def _error_message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")
