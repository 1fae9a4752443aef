"""Cluster monitor: what this gateway knows of the instances. Soft state, rebuilt from reports; nothing here blocks.

An instance is routable from its first report until its connection ends. Definitions: docs/definitions.md, "Roles and
instances". Imports `core` and `wire` only; sockets belong to `control.agents`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serving_plugin.core.types import InstanceLoad, InstanceState, Role
from serving_plugin.wire import Hello, LoadBroadcast, LoadReport, WireError

logger = logging.getLogger(__name__)

MAX_REMEMBERED_LOST = 64


@dataclass(slots=True)
class Instance:
    """One connected instance: who it is and its newest load (None until its first report)."""

    hello: Hello
    connection: object
    load: InstanceLoad | None = None
    received_s: float | None = None
    sent_tokens: int = 0


class Monitor:
    """Instances by id. A `connection` is any object that identifies one control connection."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._lost: OrderedDict[str, Hello] = OrderedDict()

    def join(self, hello: Hello, connection: object) -> None:
        """Take in an instance that said hello; the newest connection of an id wins.

        Raises:
            WireError: its KV cache cannot be exchanged with that of a connected instance of the same model.
        """
        for other in self._instances.values():
            same_model = other.hello.model == hello.model and other.hello.instance_id != hello.instance_id
            if same_model and other.hello.kv_fingerprint != hello.kv_fingerprint:
                raise WireError(
                    f"{hello.instance_id} has KV fingerprint {hello.kv_fingerprint!r}, {other.hello.instance_id} has "
                    f"{other.hello.kv_fingerprint!r}: start every instance of {hello.model} with the same "
                    f"model, dtype, block size and vLLM release"
                )
        known = self._instances.get(hello.instance_id)
        instance = Instance(hello, connection)
        if known is not None and known.hello.incarnation == hello.incarnation:  # redialled: its load still holds
            instance.load, instance.received_s, instance.sent_tokens = known.load, known.received_s, known.sent_tokens
        self._instances[hello.instance_id] = instance
        self._lost.pop(hello.instance_id, None)
        logger.info("instance %s joined: %s at %s", hello.instance_id, hello.role, hello.url)

    def report(self, report: LoadReport, connection: object, now_s: float) -> bool:
        """Take in a load report; False if it is dropped: not newer, or its connection was replaced.

        Raises:
            WireError: the report speaks for another instance than the connection's hello.
        """
        load = report.load
        instance = next((i for i in self._instances.values() if i.connection is connection), None)
        if instance is None:
            return False
        if (load.id, load.incarnation) != (instance.hello.instance_id, instance.hello.incarnation):
            raise WireError(
                f"load report of {load.id}/{load.incarnation} on the connection of "
                f"{instance.hello.instance_id}/{instance.hello.incarnation}"
            )
        if instance.load is not None and load.sequence <= instance.load.sequence:
            return False
        instance.load, instance.received_s, instance.sent_tokens = load, now_s, 0
        return True

    def leave(self, connection: object) -> None:
        """The connection ended: un-route its instance at once. No effect if a newer connection took its place."""
        for instance_id, instance in self._instances.items():
            if instance.connection is connection:
                del self._instances[instance_id]
                self._lost[instance_id] = instance.hello
                while len(self._lost) > MAX_REMEMBERED_LOST:
                    self._lost.popitem(last=False)
                logger.warning("instance %s lost its control connection and takes no new requests", instance_id)
                return

    def add_sent_tokens(self, instance_id: str, num_tokens: int) -> None:
        """Count prompt tokens sent since the instance's last report (`place` adds them to the reported load)."""
        if instance_id in self._instances:
            self._instances[instance_id].sent_tokens += num_tokens

    def sent_tokens(self) -> Mapping[str, int]:
        """Prompt tokens sent to each instance since its last report."""
        return {i: instance.sent_tokens for i, instance in self._instances.items()}

    def loads(
        self, role: Role | None = None, model: str | None = None, without: Iterable[str] = ()
    ) -> list[InstanceLoad]:
        """Newest loads of connected instances, by id; filtered by role now, served model and ids to leave out."""
        found = [
            i.load
            for i in self._instances.values()
            if i.load is not None
            and (role is None or i.load.role == role)
            and (model is None or i.hello.model == model)
            and i.load.id not in without
        ]
        return sorted(found, key=lambda load: load.id)

    def ready(self, role: Role, model: str | None = None, without: Iterable[str] = ()) -> list[InstanceLoad]:
        """Loads of READY instances of a role."""
        return [load for load in self.loads(role, model, without) if load.state is InstanceState.READY]

    def url(self, instance_id: str) -> str | None:
        """Base URL of a connected instance."""
        instance = self._instances.get(instance_id)
        return instance.hello.url if instance else None

    def instances(self) -> list[Instance]:
        """Connected instances, by id."""
        return [self._instances[i] for i in sorted(self._instances)]

    def lost(self) -> list[Hello]:
        """Instances that were connected once and are not now, the latest last."""
        return list(self._lost.values())

    def models(self) -> list[str]:
        """Served model names, sorted."""
        return sorted({i.hello.model for i in self._instances.values()})

    def broadcast(
        self, model: str, now_s: float, recent_lengths_tokens: Iterable[int] = (), is_forecast_trusted: bool = True
    ) -> LoadBroadcast:
        """What is known now of the instances that serve `model`, for their agents: no other can take their requests."""
        known = [i for i in self.instances() if i.load is not None and i.hello.model == model]
        loads = tuple(i.load for i in known if i.load is not None)
        return LoadBroadcast(
            loads,
            {i.hello.instance_id: i.hello.url for i in known},
            now_s,
            tuple(recent_lengths_tokens),
            is_forecast_trusted,
        )
