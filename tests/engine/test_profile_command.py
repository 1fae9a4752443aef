"""`tetri profile` on the real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from serving_plugin.simulator.cost_model import read_cost_model

pytestmark = pytest.mark.engine


def test_a_short_profile_gives_a_cost_model_that_predicts(tiny_target: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "profile.json", tmp_path / "profile.png"
    command = [str(Path(sys.executable).parent / "tetri"), "profile", str(tiny_target), "--short", "--json"]
    command += ["--dtype", "float32", "--out", str(out), "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = read_cost_model(out)
    assert json.loads(done.stdout) == json.loads(out.read_text())
    assert (found.dtype, found.device, found.model) == ("float32", "cpu", str(tiny_target))
    assert found.chunk_tokens >= found.saturation_tokens and found.chunk_tokens % found.block_size_tokens == 0
    prefill = [found.prefill_s([tokens]) for tokens in (1, 128, 512, 1024)]
    assert prefill[0] > 0 and all(shorter < longer for shorter, longer in pairwise(prefill)), prefill
    decode = [found.decode_s([128] * batch) for batch in (1, 4, 16)]
    assert decode[0] > 0 and all(small <= large for small, large in pairwise(decode)), decode
    assert {(point.batch_size, point.context_tokens) for point in found.decode_points} == {
        (1, 32), (4, 32), (1, 128), (4, 128),
    }  # fmt: skip
    assert all(point.sum_context_tokens > point.batch_size * point.context_tokens for point in found.decode_points)
    assert plot.read_bytes().startswith(b"\x89PNG")
