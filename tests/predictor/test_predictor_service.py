"""The predictor's process and its client, over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.client import PredictorClient
from serving_plugin.predictor.encoding import EncodedPrompt
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.service import PredictorService, QueuedRequest, next_batch, require_endpoint

READY_TIMEOUT_S = 90.0
MAX_SERVICE_RSS_BYTES = 700 * 1024**2


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "serving_plugin.predictor.service", *arguments]


@pytest.fixture(scope="module")
def endpoint(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service process on the registered champion."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('service') / 'p.sock'}"
    arguments = ("--model", "models:/length-predictor@champion", "--tracking-uri", trained.tracking_uri)
    process = subprocess.Popen(command(*arguments, "--endpoint", endpoint, "--target-model", "org/tiny-target"))
    try:
        yield endpoint
        rss = psutil.Process(process.pid).memory_info().rss
        assert rss < MAX_SERVICE_RSS_BYTES, f"{rss / 1e6:.0f} MB"
    finally:
        process.terminate()
        assert process.wait(20) == 0


async def test_info_names_the_version_and_the_provider(endpoint: str) -> None:
    client = PredictorClient(endpoint)
    try:
        info = await client.wait_ready(READY_TIMEOUT_S)
    finally:
        await client.close()
    assert info["version"] == "1"
    assert info["name"] == "length-predictor"
    assert info["uri"] == "models:/length-predictor@champion"
    assert info["target_model"] == "tiny-target"
    assert info["granularity_tokens"] == 200
    assert info["provider"].endswith("ExecutionProvider")


async def test_concurrent_requests_each_get_their_own_answer(endpoint: str, trained: Any) -> None:
    texts = [f"{kind} about {thing}" for kind in ("essay", "list", "sum") for thing in ("clocks", "rivers " * 300)] * 8
    expected = LengthPredictor.load(str(trained.export)).predict(texts)
    client = PredictorClient(endpoint)
    try:
        await client.wait_ready(READY_TIMEOUT_S)
        # one id for all: clients may repeat theirs
        answers = await asyncio.gather(*(client.forecast("same-id", text, 30) for text in texts))
    finally:
        await client.close()
    for answer, forecast in zip(answers, expected, strict=True):
        assert answer is not None
        assert answer.edges_tokens == forecast.edges_tokens
        assert answer.probabilities == pytest.approx(forecast.probabilities, abs=1e-5)


async def test_late_answer_is_none_and_harms_nobody(endpoint: str) -> None:
    client = PredictorClient(endpoint)
    try:
        await client.wait_ready(READY_TIMEOUT_S)
        assert await client.forecast("r1", "essay about clocks", 0.0) is None
        assert await client.forecast("r2", "essay about clocks", 30) is not None
    finally:
        await client.close()


def test_malformed_messages_get_an_error_and_the_service_lives(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for body in (b"{", b"[]", b'{"id": "x"}', b'{"id": 3, "text": "t"}', b'{"id": "x", "text": null}'):
            socket.send(body)
            assert socket.poll(int(READY_TIMEOUT_S * 1000))
            assert "error" in json.loads(socket.recv())
        socket.send(json.dumps({"id": "ok", "text": "a lone \ud83d surrogate"}).encode())
        assert socket.poll(20_000)
        reply = json.loads(socket.recv())
    assert reply["id"] == "ok"
    assert sum(reply["probabilities"]) == pytest.approx(1.0)
    assert reply["num_input_tokens"] > 3
    assert reply["latency_ms"] > 0


async def test_nobody_there_is_a_clear_error(tmp_path: Path) -> None:
    client = PredictorClient(f"ipc://{tmp_path}/none.sock")
    try:
        assert await client.forecast("r", "text", 0.05) is None
        with pytest.raises(ConfigurationError, match="not ready after"):
            await client.wait_ready(0.2)
    finally:
        await client.close()


def queued(*lengths: int) -> deque[QueuedRequest]:
    return deque(QueuedRequest(b"", str(i), EncodedPrompt((1,), n), 0.0) for i, n in enumerate(lengths))


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ((1, 1, 1), [["0", "1"], ["2"]]),
        ((512, 512), [["0", "1"]]),
        ((513, 1, 1), [["0"], ["1", "2"]]),
        ((1, 513, 1, 1), [["0"], ["1"], ["2", "3"]]),
        ((513, 600), [["0"], ["1"]]),
    ],
)
def test_batches_in_order_and_the_over_long_alone(lengths: tuple[int, ...], batches: list[list[str]]) -> None:
    queue = queued(*lengths)
    taken = []
    while queue:
        taken.append([request.id for request in next_batch(queue, batch_size=2, cutting_limit_tokens=512)])
    assert taken == batches


class _CountingPredictor:
    """Stands in for the model: remembers batch sizes; two buckets."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def encode(self, texts: list[str]) -> list[EncodedPrompt]:
        return [EncodedPrompt((1,), len(text)) for text in texts]

    def probabilities(self, prompts: list[EncodedPrompt]) -> int:
        self.batches.append(len(prompts))
        return len(prompts)

    def to_forecasts(self, num_prompts: int) -> list[Any]:
        from serving_plugin.core.forecast import LengthForecast

        return [LengthForecast((0, 100, 200), (0.5, 0.5))] * num_prompts


def test_what_is_queued_runs_together() -> None:
    predictor = _CountingPredictor()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.linger = dealer.linger = 0
        router.bind("inproc://service")
        dealer.connect("inproc://service")
        for i, text in enumerate(["short"] * 5 + ["x" * 600] + ["short"] * 2):
            dealer.send(json.dumps({"id": str(i), "text": text}).encode())
        stop = threading.Event()
        service = PredictorService(predictor, router, batch_size=4, cutting_limit_tokens=512)  # type: ignore[arg-type]
        thread = threading.Thread(target=service.run, args=(stop.is_set,))
        thread.start()
        replies = [json.loads(dealer.recv()) for _ in range(8) if dealer.poll(10_000)]
        stop.set()
        thread.join(10)
    assert [reply["id"] for reply in replies] == [str(i) for i in range(8)]
    assert predictor.batches == [4, 1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/folder"), "does not exist"),
        (("--model", "{export}", "--target-model", "opt-13b"), "not 'opt-13b'"),
        (("--model", "{export}", "--batch-size", "0"), "--batch-size 0"),
        (("--model", "models:/length-predictor@champion", "--tracking-uri", "sqlite:////no/mlflow.db"), "dvc repro"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, trained: Any, tmp_path: Path
) -> None:
    filled = [argument.format(export=trained.export) for argument in arguments]
    ran = subprocess.run(
        command(*filled, "--endpoint", f"ipc://{tmp_path}/p.sock"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    errors = [line for line in ran.stderr.splitlines() if " INFO " not in line]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc://", "ipc:///" + "x" * 200])
def test_endpoint_that_cannot_be_bound_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="--endpoint"):
        require_endpoint(endpoint)


def test_other_target_is_served_when_allowed_and_ends_with_its_parent(trained: Any, tmp_path: Path) -> None:
    """The parent is killed without a chance to clean up."""
    endpoint = f"ipc://{tmp_path}/p.sock"
    arguments = command(
        "--model", str(trained.export), "--endpoint", endpoint, "--target-model", "opt-13b", "--allow-other-target"
    )
    code = f"import subprocess, time; p = subprocess.Popen({arguments!r}); print(p.pid, flush=True); time.sleep(600)"
    with _killed_afterwards([sys.executable, "-c", code]) as parent:
        assert parent.stdout is not None
        service = psutil.Process(int(parent.stdout.readline()))
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(endpoint)
            socket.send(b'{"info": true}')
            assert socket.poll(int(READY_TIMEOUT_S * 1000))
    assert parent.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and service.is_running() and service.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    assert not service.is_running() or service.status() == psutil.STATUS_ZOMBIE


@contextmanager
def _killed_afterwards(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
