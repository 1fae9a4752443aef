"""Real engines: a request that one decode instance relinquishes is pulled by another, long after the first lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import Job, Mailbox, cores, decode, prefill_and_hold, pulled
from serving_plugin.core.config import AdmitSettings, InstanceSettings, TransferSettings
from serving_plugin.core.types import Role
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec

pytestmark = pytest.mark.engine

LEASE_S = 6  # vLLM's least: heartbeats once a second
WAIT_S = LEASE_S + 3.0  # D renews the lease while the request waits there
STEP_S = 0.2
NUM_BLOCKS = 10
TIMEOUT_S = 60.0
LONG = Job("long", tuple(range(5, 185)), 70, 70)
JOB = Job("waits", tuple(range(5, 125)), 12, 12)


# Run over there


def wait_in_vain(engine: Any, mailbox: str) -> dict[str, Any]:
    """The long request fills the pool; the other one waits behind it for `WAIT_S`, and is then relinquished."""
    engine.add(LONG.id, LONG.prompt_token_ids, LONG.max_tokens, kv_transfer_params={"tetri": {"request_id": LONG.id}})
    engine.step()
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (arrived := Mailbox(mailbox).take()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    params = arrived[JOB.id]
    engine.add(JOB.id, JOB.prompt_token_ids, JOB.max_tokens, kv_transfer_params=pulled(JOB, params))
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        engine.step()
        time.sleep(STEP_S)
    withdraw = engine.scheduler.withdraw
    verdicts = [str(withdraw(JOB.id, room)) for room in (100, 1000, 1000)]
    engine.run(TIMEOUT_S)
    return {
        "verdicts": verdicts,
        "params": params,
        "num_loaded": engine.scheduler.tetri_totals["num_prompt_tokens_loaded"],
        "ledger": engine.scheduler.tetri_inspect("ledger"),
    }


def decode_elsewhere(engine: Any, params: dict[str, Any], mailbox: str) -> dict[str, Any]:
    Mailbox(mailbox).put(JOB.id, params)
    progress, _ = decode(engine, [JOB], mailbox, TIMEOUT_S)
    return {
        "num_tokens": len(progress[0].token_times_s),
        "totals": dict(engine.scheduler.tetri_totals),
        "ledger": engine.scheduler.tetri_inspect("ledger"),
    }


def ledger(engine: Any) -> dict[str, Any]:
    return engine.scheduler.tetri_inspect("ledger")


# Here


@pytest.fixture
def engines(tiny_target: Path, tmp_path: Path) -> Iterator[dict[str, EngineProcess]]:
    started: dict[str, EngineProcess] = {}
    try:
        for number, (name, role) in enumerate((("p", Role.PREFILL), ("d1", Role.DECODE), ("d2", Role.DECODE))):
            spec = EngineSpec(
                str(tiny_target),
                InstanceSettings(
                    role,
                    name,
                    "http://nowhere",
                    admit=AdmitSettings("reserve_peak"),
                    transfer=TransferSettings("direct"),
                ),
                core=cores()[number % len(cores())],
                dtype="float32",
                num_blocks=NUM_BLOCKS,
                max_num_seqs=8,
                max_model_len_tokens=256,
                kv_lease_s=LEASE_S,
            )
            started[name] = EngineProcess(spec, str(tmp_path / f"{name}.log"))
        for engine in started.values():
            engine.wait_until_ready()
        yield started
    finally:
        for engine in started.values():
            engine.close()


def test_kv_outlives_a_veto_and_is_pulled_elsewhere(engines: dict[str, EngineProcess], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    engines["p"].start_call(prefill_and_hold, [JOB], str(first), TIMEOUT_S)
    engines["d1"].start_call(wait_in_vain, str(first))
    refused = engines["d1"].result(TIMEOUT_S)
    assert refused["verdicts"] == ["waits_on", "done", "unknown"]
    assert refused["num_loaded"] == 0
    assert refused["ledger"]["balanced"] and refused["ledger"]["free"] == NUM_BLOCKS
    served = engines["d2"].call(decode_elsewhere, refused["params"], str(second), timeout_s=TIMEOUT_S)
    assert served["num_tokens"] == JOB.num_output_tokens
    assert served["totals"]["num_prompt_tokens_loaded"] == len(JOB.prompt_token_ids)
    assert served["totals"]["num_prompt_tokens_computed"] == 1  # the last one, for its logits
    assert served["ledger"]["balanced"] and served["ledger"]["free"] == NUM_BLOCKS
    engines["p"].result(TIMEOUT_S)
    held = engines["p"].call(ledger, timeout_s=TIMEOUT_S)
    assert held["balanced"] and held["free"] == NUM_BLOCKS
    assert "expired" not in (tmp_path / "p.log").read_text()
