"""The predictor as a process of its own: ZMQ ROUTER, JSON messages. Must not import torch, transformers or MLflow.

    {"id", "messages": [{"role", "content"}, ...]} or {"id", "text"}
        ->  {"id", "edges_tokens", "probabilities", "num_input_tokens", "latency_ms"} or {"id", "error"}
    {"info": true}
        ->  {"info": {version, name, uri, path, provider, target_model, granularity_tokens}}

What is queued runs in batches of at most `--batch-size`, of inputs of like length; an input over the cutting limit runs
alone, so that it delays nobody in its batch (TetriInfer 3.3.2). Ends on SIGTERM and when its parent does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import zmq

from serving_plugin.core.errors import ConfigurationError, TetriError
from serving_plugin.predictor.conversation import Message, messages_of
from serving_plugin.predictor.encoding import EncodedConversation
from serving_plugin.predictor.model import LengthPredictor
from serving_plugin.predictor.registry import DEFAULT_MODEL_URI, resolve_model_in_child

logger = logging.getLogger(__name__)

# Of the model's input. The predictor's own rule (`encoding.InputRule`) usually cuts it far below, and then nothing is
# over the limit; it counts for models with a wide input.
DEFAULT_CUTTING_LIMIT_TOKENS = 512
MAX_QUEUED_REQUESTS = 4096
POLL_MS = 500
_MAX_IPC_PATH_BYTES = 107  # sun_path of a unix socket
_IPC = "ipc://"


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that waits for its batch. `peer` is the client's ZMQ identity."""

    peer: bytes
    id: str
    encoded: EncodedConversation
    arrival_s: float


def next_batch(queue: deque[QueuedRequest], batch_size: int, cutting_limit_tokens: int) -> list[QueuedRequest]:
    """Take the next batch off `queue`: the oldest request, and others whose inputs are at most the cutting limit.

    Those of like length join first, so that little is padding; an over-long one runs alone. The oldest request is
    always in the batch: nobody waits for ever.
    """
    oldest = queue.popleft()
    size = len(oldest.encoded.ids)
    if size > cutting_limit_tokens:
        return [oldest]
    others = [request for request in queue if len(request.encoded.ids) <= cutting_limit_tokens]
    others.sort(key=lambda request: abs(len(request.encoded.ids) - size))  # stable: older ones first
    chosen = others[: batch_size - 1]
    taken = {id(request) for request in chosen}
    left = [request for request in queue if id(request) not in taken]
    queue.clear()
    queue.extend(left)
    return [oldest, *chosen]


class PredictorService:
    """Answers until `should_stop`; one thread, one session."""

    def __init__(
        self, predictor: LengthPredictor, socket: zmq.Socket[bytes], batch_size: int, cutting_limit_tokens: int
    ) -> None:
        self._predictor, self._socket = predictor, socket
        self._batch_size, self._cutting_limit_tokens = batch_size, cutting_limit_tokens
        self._queue: deque[QueuedRequest] = deque()

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Serve; looks at `should_stop` at least every POLL_MS."""
        while not should_stop():
            if self._socket.poll(0 if self._queue else POLL_MS):
                self._receive_all()
            if self._queue:
                self._answer(next_batch(self._queue, self._batch_size, self._cutting_limit_tokens))

    def _receive_all(self) -> None:
        for _ in range(MAX_QUEUED_REQUESTS):  # bounded: a flood must not keep a batch from running
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames[0], frames[-1])

    def _receive(self, peer: bytes, body: bytes) -> None:
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            self._send(peer, {"id": None, "error": f"not JSON: {error}"})
            return
        if not isinstance(message, dict):
            self._send(peer, {"id": None, "error": "a message is a JSON object"})
        elif message.get("info"):
            self._send(peer, {"info": self.info()})
        elif len(self._queue) >= MAX_QUEUED_REQUESTS:
            self._send(peer, {"id": message.get("id"), "error": f"{MAX_QUEUED_REQUESTS} requests are queued already"})
        else:
            self._queue_up(peer, message)

    def _queue_up(self, peer: bytes, message: dict[str, Any]) -> None:
        arrival_s = time.monotonic()
        try:
            request_id, messages = _request(message)
        except (KeyError, TypeError) as error:
            reason = f"a request has the string 'id' and 'messages' or the string 'text' ({error})"
            self._send(peer, {"id": message.get("id"), "error": reason})
            return
        self._queue.append(QueuedRequest(peer, request_id, self._predictor.encode(messages), arrival_s))

    def _answer(self, batch: list[QueuedRequest]) -> None:
        forecasts = self._predictor.to_forecasts(self._predictor.probabilities([request.encoded for request in batch]))
        now_s = time.monotonic()
        for request, forecast in zip(batch, forecasts, strict=True):
            reply = {
                "id": request.id,
                "edges_tokens": forecast.edges_tokens,
                "probabilities": forecast.probabilities,
                "num_input_tokens": len(request.encoded.ids),
                "latency_ms": (now_s - request.arrival_s) * 1000,
            }
            self._send(request.peer, reply)

    def _send(self, peer: bytes, reply: dict[str, Any]) -> None:
        self._socket.send_multipart([peer, json.dumps(reply).encode()])

    def info(self) -> dict[str, Any]:
        """Which model answers, and where it runs."""
        resolved, spec = self._predictor.resolved, self._predictor.spec
        return {
            "version": resolved.version,
            "name": resolved.name,
            "uri": resolved.uri,
            "path": resolved.path,
            "provider": self._predictor.provider,
            "target_model": spec.target_model,
            "granularity_tokens": spec.granularity_tokens,
        }


def _request(message: dict[str, Any]) -> tuple[str, tuple[Message, ...]]:
    """Id and conversation of a request.

    Raises:
        KeyError, TypeError: a part is missing or of another type.
    """
    request_id = message["id"]
    if not isinstance(request_id, str):
        raise TypeError(f"id is a {type(request_id).__name__}")
    if "messages" in message:
        messages = messages_of(message["messages"])
        if not messages:
            raise TypeError("messages are empty")
        return request_id, messages
    if not isinstance(message["text"], str):
        raise TypeError(f"text is a {type(message['text']).__name__}")
    return request_id, (Message("user", message["text"]),)


def require_endpoint(endpoint: str) -> None:
    """Refuse an endpoint that ZMQ would refuse later, or cut.

    Raises:
        ConfigurationError: not `ipc://`, or its path is too long for a unix socket.
    """
    path = endpoint.removeprefix(_IPC)
    if not endpoint.startswith(_IPC) or not path:
        raise ConfigurationError(f"--endpoint {endpoint!r} is not of the form ipc:///path/to.sock")
    if len(os.fsencode(path)) > _MAX_IPC_PATH_BYTES:
        raise ConfigurationError(
            f"--endpoint path has {len(os.fsencode(path))} bytes, the limit is {_MAX_IPC_PATH_BYTES}: {path}"
        )


def serve(arguments: argparse.Namespace, parent_pid: int) -> None:
    """Load the model, bind, answer until the parent is gone.

    Raises:
        ConfigurationError: a model, target, endpoint or number that cannot be used.
    """
    require_endpoint(arguments.endpoint)
    if arguments.batch_size < 1 or arguments.cutting_limit_tokens < 1:
        raise ConfigurationError(
            f"--batch-size {arguments.batch_size} and --cutting-limit-tokens {arguments.cutting_limit_tokens} "
            "must be at least 1"
        )
    predictor = LengthPredictor.load(
        arguments.model,
        tracking_uri=arguments.tracking_uri,
        num_threads=arguments.num_threads,
        batch_size=arguments.batch_size,
        resolve=resolve_model_in_child,
    )
    if arguments.target_model and not arguments.allow_other_target:
        predictor.require_target(arguments.target_model)
    predictor.predict_texts(["warm up"])  # the first run allocates: not on a request's time
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 2 * MAX_QUEUED_REQUESTS
        try:
            socket.bind(arguments.endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"--endpoint {arguments.endpoint} cannot be bound ({error}); does its folder exist?"
            ) from None
        # what runs one by one gains nothing from a batch, and would be answered only when all of it is done
        batch_size = 1 if predictor.is_quantised else arguments.batch_size
        service = PredictorService(predictor, socket, batch_size, arguments.cutting_limit_tokens)
        logger.info("length predictor answers on %s", arguments.endpoint)
        # a change of parent, not PR_SET_PDEATHSIG alone: that fires when the *thread* that started us ends
        service.run(should_stop=lambda: os.getppid() != parent_pid)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Command line of the service."""
    parser = argparse.ArgumentParser(
        prog="python -m serving_plugin.predictor.service", description="Length predictor service over ZMQ."
    )
    parser.add_argument(
        "--model", default=DEFAULT_MODEL_URI, help="models:/NAME@ALIAS, models:/NAME/VERSION or a folder"
    )
    parser.add_argument("--endpoint", required=True, help="ipc:///path/to.sock")
    parser.add_argument(
        "--tracking-uri", default=None, help="MLflow registry (default: MLFLOW_TRACKING_URI or ./mlruns)"
    )
    parser.add_argument(
        "--target-model", default="", help="served model; one that the predictor was not trained for is refused"
    )
    parser.add_argument("--allow-other-target", action="store_true", help="forecast for another target all the same")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--cutting-limit-tokens", type=int, default=DEFAULT_CUTTING_LIMIT_TOKENS)
    return parser.parse_args(argv)


def _end(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; one line on stderr and exit code 2 on bad input."""
    parent_pid = os.getppid()
    arguments = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        serve(arguments, parent_pid)
    except TetriError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
