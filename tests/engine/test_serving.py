"""TetriServe against plain vLLM, on the real engine."""

from __future__ import annotations

import concurrent.futures
import json
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from real_cluster import Cluster

from serving_plugin.core.config import DEFAULT_CPU_CHUNK_TOKENS, ForecastSettings
from serving_plugin.engine.tracker import RequestTracker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

WORDS = ["river", "bridge", "clock", "kitchen", "planet", "letter", "ladder", "garden", "window", "market"]
NUM_REQUESTS = 32


def prompts(number: int, seed: int = 0) -> list[str]:
    """Prompts of mixed lengths: shorter than a block, around its borders, and over several chunks of prefill."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 3, 8, 20, 60, 150)) for _ in range(number)]
    return [" ".join(rng.choice(WORDS) for _ in range(length)) for length in lengths]


def complete(cluster: Cluster, base_url: str, prompt: str, request_id: str | None = None, **more: Any) -> Any:
    body = {"model": cluster.model, "prompt": prompt, "temperature": 0, "max_tokens": 24, **more}
    status, answer = cluster.post(
        base_url, "/v1/completions", body, {"X-Request-Id": request_id} if request_id else None
    )
    assert status == 200, answer
    return answer


def scheduler_records(cluster: Cluster, base_url: str) -> dict[str, dict[str, Any]]:
    return {record["request_id"]: record for record in cluster.get(f"{base_url}/tetri/scheduler")["requests"]}


def test_32_greedy_requests_equal_plain_vllm_and_are_really_split(cluster: Cluster) -> None:
    texts = prompts(NUM_REQUESTS)
    limits = [random.Random(i).randint(2, 60) for i in range(NUM_REQUESTS)]
    ids = [f"split-{i}" for i in range(NUM_REQUESTS)]
    before = {role: cluster.get(f"{url}/tetri/scheduler")["totals"] for role, url in _instances(cluster)}
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as pool:
        split = list(
            pool.map(
                lambda i: complete(cluster, cluster.gateway, texts[i], ids[i], max_tokens=limits[i]),
                range(NUM_REQUESTS),
            )
        )
        plain = list(
            pool.map(lambda i: complete(cluster, cluster.plain, texts[i], max_tokens=limits[i]), range(NUM_REQUESTS))
        )
    for ours, theirs in zip(split, plain, strict=True):
        assert ours["choices"][0]["text"] == theirs["choices"][0]["text"]
        assert ours["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"]
        assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]

    on_prefill, on_decode = scheduler_records(cluster, cluster.prefill), scheduler_records(cluster, cluster.decode)
    for request_id in ids:
        assert on_prefill[request_id]["num_local_prompt_tokens"] == on_prefill[request_id]["num_prompt_tokens"]
        record = on_decode[request_id]
        assert record["is_remote_prefill"]
        assert record["num_remote_tokens"] == record["num_prompt_tokens"], "every prompt token came from P"
        assert record["num_local_prompt_tokens"] == 1, "D recomputes the last prompt token only"
        assert record["forecast_source"] == "model", "each request has a predicted range in D's scheduler"
        low, high = record["length_range"]
        assert 0 <= low < high
    after = {role: cluster.get(f"{url}/tetri/scheduler")["totals"] for role, url in _instances(cluster)}
    num_prompt_tokens = sum(on_prefill[request_id]["num_prompt_tokens"] for request_id in ids)
    assert _grown(before, after, "P", "num_prompt_tokens_computed") == num_prompt_tokens
    assert _grown(before, after, "D", "num_prompt_tokens_loaded") == num_prompt_tokens
    assert _grown(before, after, "D", "num_prompt_tokens_computed") == NUM_REQUESTS

    records = {r["id"]: r for r in cluster.get(f"{cluster.gateway}/tetri/requests?limit=1000")["requests"]}
    for request_id in ids:
        record = records[request_id]
        assert record["prefill_instance"].startswith("prefill-")
        assert record["decode_instance"].startswith("decode-")
        assert record["whole_reason"] is None
        assert record["outcome"] == "ok"
        assert record["transfer_start_s"] <= record["transfer_end_s"]
        assert record["prefill_start_s"] <= record["prefill_end_s"] <= record["dispatch_s"] <= record["last_token_s"]


def _instances(cluster: Cluster) -> list[tuple[str, str]]:
    return [("P", cluster.prefill), ("D", cluster.decode)]


def _grown(before: dict[str, Any], after: dict[str, Any], role: str, total: str) -> int:
    return int(after[role][total]) - int(before[role][total])


def stream(cluster: Cluster, base_url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The parsed SSE chunks of a streamed answer, which must end with [DONE]."""
    request = urllib.request.Request(
        f"{base_url}{path}", json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [line for line in response.read().decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_chunk_changes_at_run_time_and_answers_do_not(cluster: Cluster) -> None:
    text = " ".join(random.Random(7).choice(WORDS) for _ in range(300))
    expected = complete(cluster, cluster.plain, text)["choices"][0]["text"]
    prefill_s: dict[int, float] = {}
    try:
        for chunk_tokens in (1, 7, 0):
            answer = cluster.post(cluster.prefill, "/tetri/chunk", {"chunk_tokens": chunk_tokens})
            assert answer == (200, {"chunk_tokens": chunk_tokens})
            ids = [f"chunk-{chunk_tokens}-{i}" for i in range(2)]
            for request_id in ids:
                assert complete(cluster, cluster.gateway, text, request_id)["choices"][0]["text"] == expected
            records = {r["id"]: r for r in cluster.get(f"{cluster.gateway}/tetri/requests?limit=1000")["requests"]}
            prefill_s[chunk_tokens] = min(records[i]["prefill_end_s"] - records[i]["prefill_start_s"] for i in ids)
    finally:
        cluster.post(cluster.prefill, "/tetri/chunk", {"chunk_tokens": DEFAULT_CPU_CHUNK_TOKENS})
    assert prefill_s[1] > 5 * prefill_s[0], "over 300 steps in place of one: it really changed"


@pytest.mark.parametrize("value", [-1, 1.5, "64", True, None])
def test_a_bad_chunk_is_refused_in_one_line_and_changes_nothing(cluster: Cluster, value: Any) -> None:
    status, answer = cluster.post(cluster.prefill, "/tetri/chunk", {"chunk_tokens": value})
    error = answer["error"]
    assert (status, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", "chunk_tokens")
    assert error["message"] == f"chunk_tokens={value!r}: must be a whole number, 0 (vLLM's own limit) or more"
    assert complete(cluster, cluster.gateway, "river bridge")["choices"]


def test_streaming_gives_the_same_text_and_usage(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": prompts(1, 5)[0], "temperature": 0, "max_tokens": 30}
    chunks = stream(cluster, cluster.gateway, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    whole = complete(cluster, cluster.plain, body["prompt"], max_tokens=30)
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == whole["choices"][0]["text"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_chat_equals_plain_vllm(cluster: Cluster) -> None:
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "tell me about the river"}],
        "temperature": 0,
        "max_tokens": 12,
    }
    status, ours = cluster.post(cluster.gateway, "/v1/chat/completions", body)
    assert status == 200, ours
    _, theirs = cluster.post(cluster.plain, "/v1/chat/completions", body)
    assert ours["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
    assert ours["usage"] == theirs["usage"]
    chunks = stream(cluster, cluster.gateway, "/v1/chat/completions", body)
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == theirs["choices"][0]["message"]["content"]


def test_several_samples_run_whole_and_are_counted(cluster: Cluster) -> None:
    answer = complete(cluster, cluster.gateway, "river bridge", "whole-n", n=3, temperature=0.9)
    assert len(answer["choices"]) == 3
    record = next(r for r in cluster.get(f"{cluster.gateway}/tetri/requests")["requests"] if r["id"] == "whole-n")
    assert record["whole_reason"] == "n"
    assert record["prefill_instance"] == record["decode_instance"]


def test_a_whole_request_is_found_in_the_engine_by_its_gateways_id(cluster: Cluster) -> None:
    """`max_wait_s` and relinquishing must find every part of it there, and of no other: ids are vLLM's own."""
    two = {"model": cluster.model, "n": 2, "temperature": 0.9, "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "river"}]}
    ours = {
        "whole": ("/v1/completions", {"prompt": ["river", "bridge"]}, 4),
        "whole-1": ("/v1/completions", {"prompt": "river"}, 2),
        "whole-chat": ("/v1/chat/completions", chat, 2),
    }
    for request_id, (path, more, _) in ours.items():
        status, answer = cluster.post(cluster.gateway, path, {**two, **more}, {"X-Request-Id": request_id})
        assert status == 200, answer
    tracker = RequestTracker(ForecastSettings())
    for engine_id in scheduler_records(cluster, cluster.decode):
        tracker.add(engine_id, engine_id, 1, 1, {}, 0.0)
    found = {request_id: tracker.engine_ids(request_id) for request_id in ours}
    assert {request_id: len(set(ids)) for request_id, ids in found.items()} == {i: ours[i][2] for i in ours}


def test_client_sent_kv_parameters_never_reach_an_instance(cluster: Cluster) -> None:
    evil = {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 1, "remote_block_ids": [[1]],
            "remote_engine_id": "x", "remote_request_id": "y"}  # fmt: skip
    answer = complete(
        cluster, cluster.gateway, "river", kv_transfer_params=evil, vllm_xargs={"tetri_first_token": 3}, max_tokens=8
    )
    assert answer["choices"][0]["text"] == complete(cluster, cluster.plain, "river", max_tokens=8)["choices"][0]["text"]


def test_seeded_requests_do_not_kill_the_engine_and_repeat(cluster: Cluster) -> None:
    long_prompt = " ".join(WORDS * 30)  # several chunks: the case that kills a plain CPU engine
    bodies = [
        {"seed": 7, "temperature": 0.9, "max_tokens": 10},
        {"seed": 7, "temperature": 0.9, "n": 2, "max_tokens": 10},
    ]
    for body in bodies:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda _, body=body: complete(cluster, cluster.gateway, long_prompt, **body), range(4))
            )
        texts = {tuple(choice["text"] for choice in answer["choices"]) for answer in answers}
        assert len(texts) == 1, "the same seed gives the same text"
    assert complete(cluster, cluster.gateway, "river")["choices"]


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/v1/completions", {"model": "nope", "prompt": "a"}, 404, "nope"),
        ("/v1/completions", {"prompt": "river " * 4000, "max_tokens": 5}, 400, "2048"),
        ("/v1/completions", {"prompt": "river", "max_tokens": 5000}, 400, "2048"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": "hello"}, 400, "messages"),
    ],
)
def test_bad_requests_get_openai_errors(
    cluster: Cluster, path: str, body: dict[str, Any], status: int, part: str
) -> None:
    body = {"model": cluster.model, **body}
    got, answer = cluster.post(cluster.gateway, path, body)
    assert got == status, answer
    assert part in answer["error"]["message"]
    _, theirs = cluster.post(cluster.plain, path, body)
    assert answer["error"]["type"] == theirs["error"]["type"]
    assert answer["error"]["code"] == theirs["error"]["code"]


def test_client_that_hangs_up_frees_both_sides(cluster: Cluster) -> None:
    body = {"model": cluster.model, "prompt": "river " * 50, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for wait_s in (0.0, 0.05, 0.3):
        request = urllib.request.Request(
            f"{cluster.gateway}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        response = urllib.request.urlopen(request, timeout=60)
        time.sleep(wait_s)
        response.close()
    # `ledger_is_checked` asserts that nothing is left in flight


def test_status_and_metrics_tell_what_runs(cluster: Cluster) -> None:
    status = cluster.get(f"{cluster.gateway}/tetri/status")
    roles = {instance["role"]: instance for instance in status["instances"]}
    assert set(roles) == {"prefill", "decode"}
    assert roles["prefill"]["predictor"] == "length-predictor v1"
    assert all(instance["state"] == "ready" for instance in roles.values())
    with urllib.request.urlopen(f"{cluster.gateway}/metrics", timeout=10) as response:
        text = response.read().decode()
    assert "tetri_requests_total" in text
    assert 'version="1"' in text or "length-predictor v1" in text


def test_memory_of_gateway_and_predictor(cluster: Cluster) -> None:
    import psutil

    sizes: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        command = " ".join(process.cmdline())
        for part in ("tetri gateway", "predictor.service"):
            if part in command:
                sizes[part] = max(sizes.get(part, 0.0), process.memory_info().rss / 2**20)
    assert sizes["tetri gateway"] < 300
    assert sizes["predictor.service"] < 700


def test_vllm_bench_serve_completes_against_the_gateway(cluster: Cluster, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--base-url", cluster.gateway]
    command += ["--backend", "openai", "--endpoint", "/v1/completions", "--model", cluster.model]
    command += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"]
    command += ["--num-prompts", "12", "--request-rate", "4", "--ignore-eos", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "bench.json", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["completed"] == 12
    assert result["total_output_tokens"] == 12 * 16
    assert 0 < result["mean_ttft_ms"] < 20_000
    assert 0 < result["mean_tpot_ms"] < 2_000
