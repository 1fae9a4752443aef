"""Plans of the systems (equal shares, equal flags), and the life of a started one."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serving_plugin.bench import systems
from serving_plugin.bench.systems import (
    Hardware,
    MemoryWatch,
    SystemName,
    SystemPlan,
    SystemSettings,
    free_ports,
    parse_system_name,
    plan_system,
    ports_of,
    running,
    tree_resident_bytes,
)
from serving_plugin.core.errors import ConfigurationError, LostInstanceError
from serving_plugin.processes import ChildSpec, is_up

SETTINGS = SystemSettings(Path("models/tiny"), Hardware((0, 1)), 2048, dtype="float32")
STUB = Path(__file__).parent / "stub_openai.py"


@pytest.fixture(autouse=True)
def commands(monkeypatch):
    """Plans do not depend on what is installed."""
    monkeypatch.setattr(systems, "executable", lambda name: f"/venv/bin/{name}")


def flag(command: tuple[str, ...], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


def test_coupled_servers_have_a_core_each_and_know_nothing_of_us():
    plan = plan_system(SystemName.COUPLED, SETTINGS, [20001, 20002])
    assert [child.cores for child in plan.children] == [(0,), (1,)]
    assert plan.base_urls == ("http://127.0.0.1:20001", "http://127.0.0.1:20002")
    for core, child in enumerate(plan.children):
        assert child.command[:3] == ("/venv/bin/vllm", "serve", "models/tiny")
        assert flag(child.command, "--max-num-batched-tokens") == "128"
        assert child.environment["VLLM_PLUGINS"] == ""
        assert child.environment["VLLM_CPU_OMP_THREADS_BIND"] == str(core)
        assert child.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_single_is_one_server_on_one_share_and_untuned_keeps_vllms_chunk():
    single = plan_system(SystemName.SINGLE, SETTINGS, [20001, 20002])
    assert [child.cores for child in single.children] == [(0,)] and single.chunk_tokens == 128
    untuned = plan_system(SystemName.SINGLE_UNTUNED, SETTINGS, [20001])
    assert "--max-num-batched-tokens" not in untuned.children[0].command and untuned.chunk_tokens is None


def test_all_systems_share_every_other_flag():
    tetri = plan_system(SystemName.TETRISERVE, SETTINGS, [20001]).children[0]
    coupled = plan_system(SystemName.COUPLED, SETTINGS, [20001, 20002]).children[0]
    for name in ("--max-model-len", "--max-num-seqs", "--dtype", "--block-size", "--served-model-name"):
        assert flag(tetri.command, name) == flag(coupled.command, name) is not None
    assert flag(tetri.command, "--kv-cache-gib") == coupled.environment["VLLM_CPU_KVCACHE_SPACE"]
    assert tetri.cores == () and "--no-enable-prefix-caching" in tetri.command[tetri.command.index("--") :]


def test_a_new_chunk_for_plain_servers_leaves_tetriserves_alone():
    tuned = replace(SETTINGS, chunk_tokens=512)
    assert flag(plan_system(SystemName.TETRISERVE, tuned, [1]).children[0].command, "--chunk-tokens") == "128"


def test_gpus_are_shared_out():
    settings = replace(SETTINGS, hardware=Hardware((0, 1), ("0", "1", "2", "3")), tensor_parallel_size=2)
    plan = plan_system(SystemName.COUPLED, settings, [20001, 20002])
    assert [child.environment["CUDA_VISIBLE_DEVICES"] for child in plan.children] == ["0,1", "2,3"]
    assert "--enforce-eager" not in plan.children[0].command and plan.children[0].cores == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hardware": Hardware((0,))}, "2 servers need 2 CPU cores, this machine offers 1"),
        ({"hardware": Hardware((0, 1), ("0",))}, "need 2 GPUs, this machine offers 1"),
        ({"chunk_tokens": 32}, "chunk of 32 tokens is below"),
        ({"num_prefill": 0}, "--prefill 0"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(SETTINGS, **change)


def test_unknown_system_lists_the_known():
    with pytest.raises(ConfigurationError, match="unknown system 'vidur'; known are tetriserve, coupled, single"):
        parse_system_name("vidur")


def test_ports_that_are_asked_for_must_be_free():
    [first] = free_ports(1)
    settings = replace(SETTINGS, first_port=first, num_decode=2, hardware=Hardware((0, 1, 2)))
    assert ports_of(settings) == [first, first + 1, first + 2]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        with pytest.raises(ConfigurationError, match=f"port {first + 1} is taken .* give another with --port"):
            ports_of(settings)


def stub_plan(folder: Path, port: int, *command: str) -> SystemPlan:
    line = command or (sys.executable, str(STUB), str(port))
    child = ChildSpec("stub", line, folder / "stub.log", {})
    return SystemPlan(SystemName.SINGLE, "stub", (child,), (f"http://127.0.0.1:{port}",), ("stub",), None)


def test_a_system_is_up_inside_and_gone_after(tmp_path):
    [port] = free_ports(1)
    with running(stub_plan(tmp_path, port), 30) as system:
        assert is_up(f"http://127.0.0.1:{port}/health")
        assert system.ended_child() is None and system.ready_after_s > 0
    assert not is_up(f"http://127.0.0.1:{port}/health")
    assert system.peak_resident_bytes > 10e6


def test_a_system_is_stopped_when_the_measurement_fails(tmp_path):
    [port] = free_ports(1)
    with pytest.raises(ZeroDivisionError), running(stub_plan(tmp_path, port), 30) as system:
        raise ZeroDivisionError
    assert system.children[0].exit_code() is not None


def test_a_child_that_ends_early_is_shown_with_its_log(tmp_path):
    plan = stub_plan(tmp_path, 1, sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    with pytest.raises(LostInstanceError, match=r"(?s)stub ended with code 3.*no such model"), running(plan, 30):
        pytest.fail("never ready")


def test_memory_counts_grandchildren():
    code = "x = bytearray(60_000_000); print('ready', flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        watch = MemoryWatch([process.pid], interval_s=0.05)
        watch.start()
        assert tree_resident_bytes([process.pid]) > 60e6
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(10)
        assert watch.stop() > 60e6
    assert tree_resident_bytes([process.pid]) == 0
