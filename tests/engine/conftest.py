"""Real vLLM for the engine tests: gateway + 1 prefill + 1 decode instance and one plain server, over a tiny OPT.

Instances run by the very command line that `tetri instance --print` shows. Everything is float32: in bfloat16 a greedy
token can flip where two are exactly tied.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import Cluster, free_low_port

from serving_plugin.processes import Child, ChildSpec, stop_all, wait_until_ready

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
READY_TIMEOUT_S = 480.0
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny OPT that is served; its folder bears the name that the tiny predictor was trained for."""
    from pipeline.target import make_target

    return make_target("tiny-opt", tmp_path_factory.mktemp("targets") / "tiny-target")


@pytest.fixture(scope="session")
def cluster(tiny_target: Path, trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Started once for all engine tests."""
    logs = tmp_path_factory.mktemp("logs")
    template = logs / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    ports = {name: free_low_port() for name in ("gateway", "prefill", "decode", "plain")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    vllm_flags = ["--dtype", "float32", "--chat-template", str(template)]
    cores = sorted(os.sched_getaffinity(0))
    specs = {
        "gateway": ChildSpec(
            "gateway", (str(BIN / "tetri"), "gateway", "--port", str(ports["gateway"])), logs / "gateway.log", {}
        )
    }
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    for number, role in enumerate(("prefill", "decode")):
        command = [str(BIN / "tetri"), "instance", str(tiny_target), "--role", role, "--gateway", urls["gateway"]]
        command += ["--port", str(ports[role]), "--predictor", "models:/length-predictor@champion", "--print"]
        command += ["--tracking-uri", trained.tracking_uri, "--cores", str(cores[number % len(cores)]), *vllm_flags]
        line = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
        assert line.startswith("VLLM_PLUGINS=tetri ") and " vllm serve " in line
        if role == "decode":  # one instance runs the README's line, the other the one that is printed
            line = readme_line(tiny_target, ports["decode"], ports["gateway"], line)
        specs[role] = ChildSpec(
            role, ("bash", "-c", line), logs / f"{role}.log", environment, (cores[number % len(cores)],)
        )
    plain = [str(BIN / "vllm"), "serve", str(tiny_target), "--port", str(ports["plain"]), "--host", "127.0.0.1"]
    plain += ["--enforce-eager", "--block-size", "32", "--no-enable-prefix-caching", "--max-num-seqs", "64"]
    plain += ["--max-model-len", "2048", *vllm_flags]
    environment = {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[-1])
    specs["plain"] = ChildSpec("plain", tuple(plain), logs / "plain.log", environment, (cores[-1],))
    children: dict[str, Child] = {}
    try:
        for name, spec in specs.items():
            children[f"{urls[name]}/health"] = Child(spec)
        wait_until_ready(children, READY_TIMEOUT_S)
        yield Cluster(**urls, model=str(tiny_target), target=tiny_target, logs=logs)
    finally:
        stop_all(list(children.values()))


def readme_line(target: Path, port: int, gateway_port: int, printed: str) -> str:
    """The command line that the README pins, for a decode instance, with this machine's flags as printed by tetri."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = re.findall(r"^VLLM_PLUGINS=tetri .*?\}\}\}'$", readme, re.MULTILINE | re.DOTALL)
    for old, new in (
        ("18100", str(port + 10_000)),
        ("8100", str(port)),
        ("8000", str(gateway_port)),
        ("vllm serve MODEL", f"vllm serve {target}"),
        ('"role": "prefill"', '"role": "decode"'),
        ("prefill-0", f"decode-{port}"),
    ):
        assert old in line
        line = line.replace(old, new)
    environment = " ".join(
        word for word in printed.split(" vllm serve ")[0].split() if "_CPU_" in word or "HF_" in word
    )
    flags = printed[printed.index("--enforce-eager") :]
    return f"{environment} {line} {flags}"


@pytest.fixture(autouse=True)
def ledger_is_checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test that used the cluster: all blocks are accounted for, on both instances."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").assert_settled()
