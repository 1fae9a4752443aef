"""`tetri serve` with real vLLM: starts, serves, and leaves nothing behind after Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from real_cluster import free_low_port, http_json

from serving_plugin.processes import is_up

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_serve_until_ctrl_c(tiny_target: Path, trained: Any, tmp_path: Path) -> None:
    port = free_low_port()
    command = [str(Path(sys.executable).with_name("tetri")), "serve", str(tiny_target), "--port", str(port)]
    command += ["--tracking-uri", trained.tracking_uri, "--log-dir", str(tmp_path / "logs")]
    command += ["--ready-timeout-s", "480", "--prediction-mode", "sequential", "--", "--dtype", "float32"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        wait_for_ready_line(process, tmp_path / "out")
        url = f"http://127.0.0.1:{port}"
        assert is_up(f"{url}/health")
        body = {"model": str(tiny_target), "prompt": "river bridge", "max_tokens": 8, "temperature": 0}
        status, answer = http_json(f"{url}/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] > 0
        _, served = http_json(f"{url}/tetri/requests")
        assert served["requests"][-1]["whole_reason"] is None
        assert served["requests"][-1]["forecast_ready_s"] <= served["requests"][-1]["prefill_start_s"], "sequential"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 7  # gateway, 2 x (API server, EngineCore, worker), predictor
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, [p.cmdline() for p in alive]
        assert not is_up(f"{url}/health")
    finally:
        if process.poll() is None:
            process.kill()


def wait_for_ready_line(process: subprocess.Popen[bytes], out: Path) -> None:
    """Until `tetri serve` says that it is ready; fails with its output if it ends before."""
    while "ready: " not in out.read_text():
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(f"tetri serve ended with code {code}:\n{out.read_text()}")
