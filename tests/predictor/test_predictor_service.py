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
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.client import PredictorClient
from serving_plugin.predictor.conversation import Message
from serving_plugin.predictor.encoding import EncodedConversation
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.service import PredictorService, QueuedRequest, next_batch, require_endpoint

READY_TIMEOUT_S = 90.0
QUESTION = (Message("user", "essay about clocks"),)
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
    asked = [f"{kind} about {thing}" for kind in ("essay", "list", "sum") for thing in ("clocks", "rivers " * 300)]
    before = ((), (Message("user", "sum"), Message("assistant", "four " * 90)))
    conversations = [(*earlier, Message("user", text)) for earlier in before for text in asked] * 4
    expected = LengthPredictor.load(str(trained.export)).predict(conversations)
    assert len({forecast.probabilities for forecast in expected}) == 12
    client = PredictorClient(endpoint)
    try:
        await client.wait_ready(READY_TIMEOUT_S)
        # one id for all: clients may repeat theirs
        answers = await asyncio.gather(*(client.forecast("same-id", messages, 30) for messages in conversations))
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
        assert await client.forecast("r1", QUESTION, 0.0) is None
        assert await client.forecast("r2", QUESTION, 30) is not None
    finally:
        await client.close()


async def test_a_refused_conversation_is_none(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    client = PredictorClient(endpoint)
    try:
        await client.wait_ready(READY_TIMEOUT_S)
        assert await client.forecast("r1", (), 30) is None
        assert await client.forecast("r2", QUESTION, 30) is not None
    finally:
        await client.close()
    assert "request r1: length predictor failed" in caplog.text and "messages are empty" in caplog.text


def ask(endpoint: str, *bodies: bytes) -> list[dict[str, Any]]:
    """Replies of the service, in the order of the requests."""
    replies = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        for body in bodies:
            socket.send(body)
            assert socket.poll(int(READY_TIMEOUT_S * 1000))
            replies.append(json.loads(socket.recv()))
    return replies


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "a message is a JSON object"),
        (b'{"id": "x"}', "'text'"),
        (b'{"text": "t"}', "'id'"),
        (b'{"id": 3, "text": "t"}', "id is a int"),
        (b'{"id": "x", "text": null}', "text is a NoneType"),
        (b'{"id": "x", "messages": []}', "messages are empty"),
        (b'{"id": "x", "messages": null}', "messages are a NoneType"),
        (b'{"id": "x", "messages": "hello"}', "messages are a str"),
        (b'{"id": "x", "messages": {"role": "user"}}', "messages are a dict"),
        (b'{"id": "x", "messages": [["user", "hello"]]}', "a message is a list"),
        (b'{"id": "x", "messages": [{"role": "user", "content": "a"}, 5]}', "a message is a int"),
    ],
)
def test_malformed_requests_get_an_error_and_the_service_lives(body: bytes, message: str, endpoint: str) -> None:
    refused, answered = ask(endpoint, body, b'{"id": "ok", "text": "t"}')
    assert message in refused["error"]
    assert "probabilities" not in refused
    if body.startswith(b'{"id": "x"'):
        assert refused["id"] == "x"
    assert answered["id"] == "ok" and "error" not in answered


def test_text_and_messages_are_answered(endpoint: str) -> None:
    odd = "a lone \ud83d surrogate"
    by_text, by_messages, by_parts, empty = ask(
        endpoint,
        json.dumps({"id": "1", "text": odd}).encode(),
        json.dumps({"id": "2", "messages": [{"role": "user", "content": odd}]}).encode(),
        json.dumps({"id": "3", "messages": [{"content": [{"type": "text", "text": odd}]}], "text": 5}).encode(),
        json.dumps({"id": "4", "messages": [{"role": "user", "content": None}]}).encode(),
    )
    for reply in (by_text, by_messages, by_parts, empty):
        assert sum(reply["probabilities"]) == pytest.approx(1.0)
        assert reply["latency_ms"] > 0
    assert by_text["probabilities"] == by_messages["probabilities"] == by_parts["probabilities"]
    assert by_text["num_input_tokens"] > 3
    assert empty["num_input_tokens"] == 1  # </s>
    assert [reply["id"] for reply in (by_text, by_messages, by_parts, empty)] == ["1", "2", "3", "4"]


def test_a_longer_conversation_is_another_input(endpoint: str) -> None:
    question = {"role": "user", "content": "list about rivers"}
    earlier = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "four " * 90}]
    alone, later = ask(
        endpoint,
        json.dumps({"id": "1", "messages": [question]}).encode(),
        json.dumps({"id": "2", "messages": [*earlier, question]}).encode(),
    )
    assert later["num_input_tokens"] > alone["num_input_tokens"]
    assert later["probabilities"] != alone["probabilities"]


async def test_nobody_there_is_a_clear_error(tmp_path: Path) -> None:
    client = PredictorClient(f"ipc://{tmp_path}/none.sock")
    try:
        assert await client.forecast("r", QUESTION, 0.05) is None
        with pytest.raises(ConfigurationError, match="not ready after"):
            await client.wait_ready(0.2)
    finally:
        await client.close()


def encoded(num_ids: int) -> EncodedConversation:
    return EncodedConversation((1,) * num_ids, (), num_ids, 0)


def queued(*lengths: int) -> deque[QueuedRequest]:
    return deque(QueuedRequest(b"", str(i), encoded(n), 0.0) for i, n in enumerate(lengths))


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ((1, 1, 1), ["01", "2"]),  # in order among equals
        ((512, 512), ["01"]),  # the limit itself is within it
        ((513, 1, 1), ["0", "12"]),  # over it: alone
        ((1, 513, 1, 1), ["02", "1", "3"]),  # and skipped, but next
        ((513, 600), ["0", "1"]),
        ((40, 500, 3, 45), ["03", "12"]),  # like lengths together
        ((40, 500, 35, 45), ["02", "13"]),  # of two as near the older
        ((1, 400, 2, 410), ["02", "13"]),
        ((600,), ["0"]),
    ],
)
def test_batches_of_like_lengths_and_the_over_long_alone(lengths: tuple[int, ...], batches: list[str]) -> None:
    queue = queued(*lengths)
    taken = []
    while queue:
        taken.append("".join(request.id for request in next_batch(queue, batch_size=2, cutting_limit_tokens=512)))
    assert taken == batches


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=30),
    batch_size=st.integers(1, 6),
    arrivals=st.lists(st.integers(1, 700), max_size=40),
)
def test_batches_lose_nobody_and_the_oldest_is_always_in(
    lengths: list[int], batch_size: int, arrivals: list[int]
) -> None:
    """While newcomers of any length keep coming, a request waits for at most as many batches as were before it."""
    queue = queued(*lengths)
    left, everyone = list(arrivals), [request.id for request in queue]
    answered: list[str] = []
    while queue:
        before = list(queue)
        batch = next_batch(queue, batch_size, cutting_limit_tokens=512)
        assert batch[0] is before[0]
        assert 1 <= len(batch) <= batch_size
        assert [request for request in before if request not in batch] == list(queue)  # the rest keeps its order
        sizes = [len(request.encoded.ids) for request in batch]
        assert len(batch) == 1 or max(sizes) <= 512
        fitting = [request for request in before[1:] if len(request.encoded.ids) <= 512]
        if sizes[0] <= 512:
            assert len(batch) == min(batch_size, 1 + len(fitting))  # no seat stays empty
            furthest = max((abs(size - sizes[0]) for size in sizes[1:]), default=0)
            assert all(abs(len(one.encoded.ids) - sizes[0]) >= furthest for one in fitting if one not in batch)
        answered += [request.id for request in batch]
        for _ in range(batch_size):
            if left:
                request = QueuedRequest(b"", f"new{len(left)}", encoded(left.pop()), 1.0)
                queue.append(request)
                everyone.append(request.id)
    assert sorted(answered) == sorted(everyone)


class _CountingPredictor:
    """Stands in for the model: remembers the batches' ids; two buckets. An input is as long as its last message."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def encode(self, messages: tuple[Message, ...]) -> EncodedConversation:
        return encoded(len(messages[-1].content))

    def probabilities(self, batch: list[EncodedConversation]) -> int:
        self.batches.append([len(one.ids) for one in batch])
        return len(batch)

    def to_forecasts(self, num_prompts: int) -> list[Any]:
        from serving_plugin.core.forecast import LengthForecast

        return [LengthForecast((0, 100, 200), (0.5, 0.5))] * num_prompts


def test_what_is_queued_runs_together() -> None:
    predictor = _CountingPredictor()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        router.linger = dealer.linger = 0
        router.bind("inproc://service")
        dealer.connect("inproc://service")
        for i, length in enumerate((5, 5, 40, 5, 6, 600, 5, 41)):
            dealer.send(json.dumps({"id": str(i), "text": "x" * length}).encode())
        stop = threading.Event()
        service = PredictorService(predictor, router, batch_size=4, cutting_limit_tokens=512)  # type: ignore[arg-type]
        thread = threading.Thread(target=service.run, args=(stop.is_set,))
        thread.start()
        replies = [json.loads(dealer.recv()) for _ in range(8) if dealer.poll(10_000)]
        stop.set()
        thread.join(10)
    assert [reply["id"] for reply in replies] == list("01362745")
    assert [reply["num_input_tokens"] for reply in replies] == [5, 5, 5, 5, 40, 41, 6, 600]
    assert predictor.batches == [[5, 5, 5, 5], [40, 41, 6], [600]]


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
