"""Small builders for policy tests: a load or request with everything unimportant filled in."""

from dataclasses import replace

from serving_plugin.core.forecast import LengthRange
from serving_plugin.core.types import InstanceLoad, InstanceState, RequestInfo, Role

_LOAD = InstanceLoad(
    id="i",
    incarnation="1",
    role=Role.DECODE,
    role_epoch=0,
    state=InstanceState.READY,
    sequence=1,
    num_waiting=0,
    num_loading=0,
    num_running=0,
    num_waiting_prompt_tokens=0,
    num_vetoed_tokens=0,
    num_total_blocks=100,
    num_free_blocks=100,
    num_pinned_blocks=0,
    block_size_tokens=16,
    num_heavy_decodes=0,
    num_light_decodes=0,
    busy_fraction=0.0,
)


def load(id: str, role: Role = Role.DECODE, **changes: object) -> InstanceLoad:
    return replace(_LOAD, id=id, role=role, **changes)  # type: ignore[arg-type]


def request(prompt: int = 100, low: int = 0, high: int = 200, heavy: bool | None = False) -> RequestInfo:
    return RequestInfo("r", 0.0, prompt, 1000, length_range=LengthRange(low, high), is_heavy_decode=heavy)
