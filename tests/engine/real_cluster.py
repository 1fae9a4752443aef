"""A running cluster as tests see it: URLs, plain HTTP calls and the block ledger."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_plugin.processes import free_port

SETTLE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Cluster:
    """Base URLs of what runs, and the served model's name."""

    gateway: str
    prefill: str
    decode: str
    plain: str
    model: str
    target: Path
    logs: Path

    def post(self, base_url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """(status, JSON) of a POST; never raises for an error status."""
        return http_json(f"{base_url}{path}", body, headers)

    def get(self, url: str) -> Any:
        """JSON behind a GET that must answer 200."""
        status, answer = http_json(url)
        assert status == 200, (url, status, answer)
        return answer

    def ledgers(self) -> dict[str, dict[str, Any]]:
        """The block ledger of both instances."""
        return {name: self.get(f"{url}/tetri/ledger") for name, url in (("P", self.prefill), ("D", self.decode))}

    def assert_settled(self) -> None:
        """Within a bound nothing is in flight and every block is free or cached, on both instances."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            ledgers = self.ledgers()
            if all(ledger["in_flight_requests"] == 0 for ledger in ledgers.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        for name, ledger in ledgers.items():
            assert ledger["balanced"], (name, ledger["problems"])
            assert ledger["in_flight_requests"] == 0, (name, ledger)
            assert ledger["free"] + ledger["cached"] == ledger["total"], (name, ledger)


def http_json(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """(status, parsed JSON or text) of one request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, _parsed(response.read())
    except urllib.error.HTTPError as error:
        return error.code, _parsed(error.read())


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


def free_low_port() -> int:
    """A free port that leaves room for the side channel's offset above it."""
    while (port := free_port()) > 50_000:
        pass
    return port
