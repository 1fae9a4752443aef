"""Real engines with real KV transfer, and a decode instance whose pool holds a few requests: every admission policy."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import Job, cores, decode, prefill_and_hold
from serving_plugin.core.admit import ADMIT_ORDERS, ADMIT_POLICIES
from serving_plugin.core.config import AdmitSettings, InstanceSettings, OrderSettings, TransferSettings
from serving_plugin.core.types import Role
from serving_plugin.engine.offline_process import EngineProcess, EngineSpec

pytestmark = pytest.mark.engine

BLOCK_SIZE_TOKENS = 32  # the least on CPU
NUM_BLOCKS = 10  # vLLM wants one request of `max_model_len_tokens` to fit: 8 blocks
NUM_PREFILL_BLOCKS = 48  # half of them may wait to be pulled: not all prompts at once
TIMEOUT_S = 60.0


# Run over there


def configure(engine: Any, settings: InstanceSettings) -> None:
    engine.configure(settings)


def decode_and_keep_tokens(engine: Any, jobs: list[Job], mailbox: str | None) -> dict[str, Any]:
    """`benchmarks.engines.decode`, with the tokens of every reply, the scheduler's own account and the ledger after."""
    tokens: dict[str, list[int]] = {job.id: [] for job in jobs}
    note = engine._note

    def note_tokens(output: Any, end_s: float) -> None:
        tokens[output.request_id] += output.new_token_ids
        note(output, end_s)

    engine._note = note_tokens
    before = dict(engine.scheduler.tetri_totals)
    try:
        progress, steps = decode(engine, jobs, mailbox, TIMEOUT_S)
    finally:
        engine._note = note
    inspected = engine.scheduler.tetri_inspect("requests")
    return {
        "tokens": tokens,
        "num_preemptions": {job.id: p.num_preemptions for job, p in zip(jobs, progress, strict=True)},
        "least_free_blocks": min(step.num_free_blocks for step in steps),
        "totals": {key: value - before[key] for key, value in inspected["totals"].items()},
        "records": {record["request_id"]: record for record in inspected["requests"]},
        "ledger": engine.scheduler.tetri_inspect("ledger"),
    }


def ledger(engine: Any) -> dict[str, Any]:
    return engine.scheduler.tetri_inspect("ledger")


# Here


def settings(role: Role, admit: AdmitSettings | None = None) -> InstanceSettings:
    return InstanceSettings(
        role,
        role.value,
        "http://nowhere",
        order=OrderSettings("sjf"),
        admit=admit or AdmitSettings("greedy"),
        transfer=TransferSettings("direct"),
    )


def make_jobs() -> list[Job]:
    """Replies of 5 to 60 tokens; most forecasts hold them, one is far too short."""
    generator = random.Random(11)
    jobs = []
    for number in range(12):
        true = generator.randint(5, 60)
        low = max(0, true - generator.randint(1, 12))
        length_range = [low, true + generator.randint(1, 15)]
        if number == 1:
            true, length_range = 90, [0, 3]
        forecast = {"edges_tokens": length_range, "probabilities": [1.0]}
        prompt = tuple(generator.randint(5, 90) for _ in range(generator.randint(40, 90)))
        jobs.append(Job(f"q{number}", prompt, true, 128, 0.0, {"forecast": forecast, "length_range": length_range}))
    return jobs


JOBS = make_jobs()
TOO_SHORT = "q1"


@dataclass
class Pair:
    prefill: EngineProcess
    decode: EngineProcess
    tokens_alone: dict[str, list[int]]


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill and a decode engine; what each request gets when it runs whole and alone."""
    logs = tmp_path_factory.mktemp("engines")
    common: dict[str, Any] = {
        "model": str(tiny_target),
        "dtype": "float32",
        "block_size_tokens": BLOCK_SIZE_TOKENS,
        "max_num_seqs": 8,
        "max_model_len_tokens": 256,
    }
    prefill_spec = EngineSpec(settings=settings(Role.PREFILL), core=cores()[0], num_blocks=NUM_PREFILL_BLOCKS, **common)
    decode_spec = EngineSpec(settings=settings(Role.DECODE), core=cores()[-1], num_blocks=NUM_BLOCKS, **common)
    with (
        EngineProcess(prefill_spec, str(logs / "prefill.log")) as p,
        EngineProcess(decode_spec, str(logs / "decode.log")) as d,
    ):
        p.wait_until_ready()
        alone = {}
        for job in JOBS:
            alone |= d.call(decode_and_keep_tokens, [job], None, timeout_s=TIMEOUT_S)["tokens"]
        yield Pair(p, d, alone)


def serve(pair: Pair, admit: AdmitSettings, mailbox: Path) -> dict[str, Any]:
    pair.decode.call(configure, settings(Role.DECODE, admit))
    pair.prefill.start_call(prefill_and_hold, JOBS, str(mailbox), TIMEOUT_S)
    pair.decode.start_call(decode_and_keep_tokens, JOBS, str(mailbox))
    answer: dict[str, Any] = pair.decode.result(TIMEOUT_S + 10)
    pair.prefill.result(TIMEOUT_S + 10)
    return answer


def assert_all_is_free(found: dict[str, Any], num_blocks: int) -> None:
    assert found["balanced"], found["problems"]
    assert (found["free"], found["total"], found["in_flight_requests"]) == (num_blocks, num_blocks, 0)


@pytest.mark.parametrize("order", ADMIT_ORDERS)
@pytest.mark.parametrize("policy", ADMIT_POLICIES)
def test_every_request_gets_exactly_its_tokens(pair: Pair, tmp_path: Path, policy: str, order: str) -> None:
    found = serve(pair, AdmitSettings(policy, order, max_veto_s=5.0, max_overtaken=6), tmp_path)
    assert found["tokens"] == pair.tokens_alone
    assert {job.id: len(found["tokens"][job.id]) for job in JOBS} == {job.id: job.num_output_tokens for job in JOBS}
    assert_all_is_free(found["ledger"], NUM_BLOCKS)
    assert_all_is_free(pair.prefill.call(ledger), NUM_PREFILL_BLOCKS)
    assert found["least_free_blocks"] < 4  # it was a small pool
    for job in JOBS:
        record = found["records"][job.id]
        assert (record["is_remote_prefill"], record["num_remote_tokens"]) == (True, len(job.prompt_token_ids))
        assert record["num_overtaken"] <= 6
    totals = found["totals"]
    assert totals["num_prompt_tokens_loaded"] == sum(len(job.prompt_token_ids) for job in JOBS)
    assert totals["num_prompt_tokens_computed"] == len(JOBS)  # the last token of each prompt
    assert totals["num_output_tokens"] == sum(job.num_output_tokens - 1 for job in JOBS)
    assert totals["num_preemptions"] == sum(found["num_preemptions"].values())
    assert (totals["num_tokens_recomputed"] > 0) is (totals["num_preemptions"] > 0)
    low, high = found["records"][TOO_SHORT]["length_range"]
    assert low > 3 and high > 3  # it outgrew its forecast more than once, and went on


def test_greedy_preempts_where_reserve_peak_of_good_ranges_does_not(pair: Pair, tmp_path: Path) -> None:
    """Five requests of two blocks fit, and each comes to five: all wait when the first is admitted, none by chance."""
    forecast = {"edges_tokens": [60, 100], "probabilities": [1.0]}
    jobs = [
        Job(f"g{i}", tuple(range(5, 65)), 80 + i, 128, 0.0, {"forecast": forecast, "length_range": [60, 100]})
        for i in range(8)
    ]
    preemptions = {}
    for policy in ("greedy", "reserve_peak"):
        mailbox = tmp_path / policy
        mailbox.mkdir()
        pair.prefill.start_call(prefill_and_hold, jobs, str(mailbox), TIMEOUT_S)
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(list(mailbox.glob("*.json"))) < len(jobs):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        pair.decode.call(configure, settings(Role.DECODE, AdmitSettings(policy, max_veto_s=60.0)))
        found = pair.decode.call(decode_and_keep_tokens, jobs, str(mailbox), timeout_s=TIMEOUT_S)
        pair.prefill.result(TIMEOUT_S + 10)
        preemptions[policy] = found["totals"]["num_preemptions"]
    assert preemptions["greedy"] > 0 == preemptions["reserve_peak"]
