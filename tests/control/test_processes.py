"""Children end with us, however we end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, os, time
from serving_plugin.processes import end_with_parent

def work():
    end_with_parent()
    print(os.getpid(), flush=True)
    while True:  # busy: nothing reads a pipe
        time.sleep(0.01)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_of_multiprocessing_ends_with_its_parent(tmp_path: Path, ended_by: signal.Signals) -> None:
    script = tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child_pid = int(parent.stdout.readline())
        parent.send_signal(ended_by)
        parent.wait(timeout=30)
        deadline_s = time.monotonic() + 10.0
        while _is_alive(child_pid):
            assert time.monotonic() < deadline_s, f"process {child_pid} outlives its parent"
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
