"""Records the states in which the scheduler judges a decode queue: tests/core/recorded/scheduler_states.json.

    python tests/engine/record_states.py

vLLM's own scheduler with the mixin, its pool of 24 blocks and the made-up model of `scheduler_rig`. Every state is what
the adapter gave to `core.admit.admit_queue` and what came back. The same file comes out every time.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from serving_plugin.core.admit import Candidate, DecodePool, QueueRules, admit_queue
from serving_plugin.core.forecast import LengthForecast, LengthRange

if TYPE_CHECKING:
    from scheduler_rig import Rig

RECORDED = Path(__file__).parents[1] / "core" / "recorded" / "scheduler_states.json"
NUM_BLOCKS, NUM_REQUESTS, NUM_STATES = 24, 40, 60
POLICY = "reserve_dynamic"
EDGES_TOKENS = (0, 8, 16, 32, 64, 129)
SETTINGS: dict[str, Any] = {"role": "decode", "admit": {"policy": POLICY, "max_veto_s": 40.0, "max_overtaken": 12}}


def record(rig: Rig) -> list[dict[str, Any]]:
    """The states of `NUM_REQUESTS` requests that come, are pulled, admitted and served; all of them."""
    found: list[dict[str, Any]] = []

    def judge(queue: list[Candidate], pool: DecodePool, policy: Any, rules: QueueRules) -> Any:
        admitted, after = admit_queue(queue, pool, policy, rules)
        found.append(_as_json(rig.num_steps, queue, pool, rules, admitted))
        return admitted, after

    generator = random.Random(20)
    with (
        mock.patch("serving_plugin.engine.scheduler.admit_queue", judge),
        mock.patch("serving_plugin.engine.scheduler.unix_now_s", lambda: rig.now_s),
    ):
        for number in range(NUM_REQUESTS):
            weights = [generator.choice((0, 1, 1, 2, 5)) for _ in EDGES_TOKENS[1:]]
            forecast = LengthForecast.from_weights(EDGES_TOKENS, weights if any(weights) else [1] * len(weights))
            bucket = generator.choices(range(len(weights)), forecast.probabilities)[0]
            true = max(1, generator.randrange(EDGES_TOKENS[bucket], EDGES_TOKENS[bucket + 1]))
            length_range = forecast.range(0.8)
            rig.add(
                f"q{number}",
                generator.randint(10, 90),
                true,
                max_tokens=128,
                forecast=(list(EDGES_TOKENS), [round(p, 6) for p in forecast.probabilities]),
                length_range=(length_range.low_tokens, length_range.high_tokens),
                is_remote=number % 5 != 4,
            )
            rig.steps(generator.choice((0, 0, 1, 4)))
        rig.run(4000)
    rig.check_done()
    return found


def _as_json(
    step: int, queue: list[Candidate], pool: DecodePool, rules: QueueRules, admitted: list[int]
) -> dict[str, Any]:
    return {
        "step": step,
        "free_blocks": pool.num_free_blocks,
        "num_seats": rules.num_seats,
        "active": [
            [q.num_prompt_tokens, q.num_output_tokens, *_range(q.length_range), q.num_held_blocks, _weights(q.forecast)]
            for q in pool.active
        ],
        "queue": [
            [
                candidate.newcomer.num_prompt_tokens,
                *_range(candidate.newcomer.length_range),
                _weights(candidate.newcomer.forecast),
                round(candidate.expected_tokens, 3),
                candidate.num_overtaken,
                round(candidate.vetoed_s, 3),
            ]
            for candidate in queue
        ],
        "admitted": admitted,
    }


def _range(length_range: LengthRange) -> tuple[int, int]:
    return length_range.low_tokens, length_range.high_tokens


def _weights(forecast: LengthForecast | None) -> list[float]:
    assert forecast is not None and forecast.edges_tokens == EDGES_TOKENS
    return [round(p, 6) for p in forecast.probabilities]


def as_file(states: list[dict[str, Any]]) -> str:
    """The recorded file: what it is, and `NUM_STATES` of the states, one a line; half of them admit somebody."""
    head = {
        "about": "states of vLLM's scheduler in which TetriServe judged a decode instance's queue, and its decisions",
        "made_by": "python tests/engine/record_states.py",
        "active": ["prompt", "out", "low", "high", "held", "probabilities"],
        "queue": ["prompt", "low", "high", "probabilities", "expected", "overtaken", "vetoed_s"],
        "edges_tokens": EDGES_TOKENS,
        "policy": POLICY,
        "max_veto_s": SETTINGS["admit"]["max_veto_s"],
        "max_overtaken": SETTINGS["admit"]["max_overtaken"],
        "block_size_tokens": 16,
        "total_blocks": NUM_BLOCKS,
        "num_judged": len(states),
    }
    halves = ([s for s in states if s["admitted"]], [s for s in states if not s["admitted"]])
    number = NUM_STATES // 2
    chosen = [half[i * len(half) // number] for half in halves for i in range(min(number, len(half)))]
    chosen.sort(key=lambda state: state["step"])
    lines = ",\n".join(json.dumps(state, separators=(",", ":")) for state in chosen)
    return json.dumps(head, indent=1)[:-2] + ',\n "states": [\n' + lines + "\n]}\n"


def main() -> None:
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from scheduler_rig import PLAIN, Rig, make_vllm_config

    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(make_vllm_config(Path(folder)), PLAIN, NUM_BLOCKS, SETTINGS)
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_text(as_file(record(rig)))
        rig.close()


if __name__ == "__main__":
    main()
