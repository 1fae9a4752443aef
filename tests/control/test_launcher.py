"""Command lines, checks before long work, and a cluster's life with stand-in children."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from serving_plugin.bench.systems import free_ports
from serving_plugin.cli import serve as serve_cli
from serving_plugin.control import checks
from serving_plugin.control.launcher import (
    ClusterPlan,
    Device,
    InstancePlan,
    base_url,
    build_instance_command,
    cluster_specs,
    run_cluster,
)
from serving_plugin.control.settings import GatewaySettings
from serving_plugin.core.config import InstanceSettings, PredictionSettings
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.types import Role
from serving_plugin.processes import ChildSpec

SETTINGS = InstanceSettings(Role.PREFILL, "prefill-0", "http://127.0.0.1:8100", ("http://127.0.0.1:8000",))
PLAN = InstancePlan("/m/tiny", SETTINGS, Device.CPU, "127.0.0.1", 8100, cores=(1,), is_local_model=True)


def free_port() -> int:
    """A port whose instances' ports, and those of their handshakes, are free as well: `tetri serve` takes them all."""
    while True:
        (port,) = free_ports(1)
        instances = [port + 100 + i for i in range(4)]
        if all(checks.preflight.port_problem(one + above, "") is None for one in instances for above in (0, 10_000)):
            return port


@pytest.fixture
def app():
    app = typer.Typer()
    serve_cli.register(app)
    return app


# Command lines


def test_the_canonical_command_line():
    environment, argv = build_instance_command(PLAN)
    assert environment == {
        "VLLM_PLUGINS": "tetri",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "18100",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "1",
    }
    config = json.loads(argv.pop(argv.index("--kv-transfer-config") + 1))
    assert argv == shlex.split(
        "vllm serve /m/tiny --scheduler-cls serving_plugin.engine.scheduler.make_scheduler --kv-transfer-config "
        "--host 127.0.0.1 --port 8100 --enforce-eager --block-size 32 --no-enable-prefix-caching "
        "--max-num-seqs 64 --max-model-len 2048"
    )
    assert InstanceSettings.from_dict(config.pop("kv_connector_extra_config")) == SETTINGS
    assert config == {
        "kv_connector": "TetriConnector",
        "kv_connector_module_path": "serving_plugin.engine.connector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
    }


def test_on_gpus_devices_are_handed_out_and_vllm_keeps_its_defaults():
    plan = replace(PLAN, device=Device.CUDA, cores=(), devices=("2", "3"), tensor_parallel_size=2, is_local_model=False)
    environment, argv = build_instance_command(replace(plan, served_model_name="m"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not environment.keys() & {"VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE"}
    assert argv[-4:] == ["--served-model-name", "m", "--tensor-parallel-size", "2"]
    assert "kv_buffer_device" not in argv[argv.index("--kv-transfer-config") + 1]


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (("--max-num-seqs", "8"), "64"),
        (("--max_model_len=512",), "2048"),
        (("--enable-prefix-caching",), "--no-enable-prefix-caching"),
        (("--no-enforce-eager",), "--enforce-eager"),
    ],
)
def test_the_users_flags_win_over_defaults(flags, gone):
    _, argv = build_instance_command(replace(PLAN, vllm_flags=flags))
    assert gone not in argv and tuple(argv[-len(flags) :]) == flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-transfer-config", "{}"), "--kv-transfer-config is set by tetri"),
        (("-tp", "2"), "--tensor-parallel-size is set by tetri"),
        (("--scheduler_cls=x",), "--scheduler-cls is set by tetri"),
        (("stray",), "'stray' is not a vLLM flag"),
    ],
)
def test_flags_that_would_be_lost_are_refused(flags, words):
    with pytest.raises(ConfigurationError, match=words):
        build_instance_command(replace(PLAN, vllm_flags=flags))


def test_other_plugins_stay_allowed():
    environment, _ = build_instance_command(replace(PLAN, plugins=("tetri", "lora")))
    assert environment["VLLM_PLUGINS"] == "tetri,lora"


def test_a_cluster_is_a_gateway_and_its_instances():
    plan = ClusterPlan(GatewaySettings(host="0.0.0.0", port=8000), (PLAN,), Path("logs"))
    specs = cluster_specs(plan, vllm="/bin/vllm")
    assert list(specs) == ["http://127.0.0.1:8000/health", "http://127.0.0.1:8100/health"]
    gateway, instance = specs.values()
    assert json.loads(gateway.command[-1])["port"] == 8000
    assert instance.command[:3] == ("/bin/vllm", "serve", "/m/tiny")
    assert (instance.name, instance.cores, gateway.cores) == ("prefill-0", (1,), ())
    assert instance.log_path == Path("logs/prefill-0.log")


def test_the_printed_line_is_what_would_run(app):
    arguments = [
        *("instance", "org/model", "--role", "decode", "--gateway", "http://10.0.0.1:8000", "--port", "8101"),
        *("--host", "0.0.0.0", "--url", "http://10.0.0.2:8101", "--admit", "greedy", "--predictor", "none"),
        *("--print", "--dtype", "float32", "--seed=3"),
    ]
    shadow = [*arguments, "--shadow-predictor", "models:/length-predictor@challenger"]
    shadow[shadow.index("decode")] = "prefill"
    assert '"shadow_model": "models:/length-predictor@challenger"' in CliRunner().invoke(app, shadow).stdout
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    settings = InstanceSettings.from_dict(
        json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    )
    assert (settings.role, settings.instance_id, settings.url) == (Role.DECODE, "decode-8101", "http://10.0.0.2:8101")
    assert (settings.admit.policy, settings.prediction.model) == ("greedy", None)
    assert words[-3:] == ["--dtype", "float32", "--seed=3"]
    assert "VLLM_PLUGINS=tetri" in words


def test_bounds_of_admission_are_in_the_printed_line(app):
    arguments = ["instance", "org/model", "--role", "decode", "--predictor", "none", "--print"]
    bounds = ["--admit", "reserve_expected", "--admit-order", "shortest_expected", "--max-veto-s", "3"]
    bounds += ["--max-wait-s", "60", "--overflow-probability", "0.05"]

    def printed(more) -> dict:
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        words = shlex.split(result.stdout)
        return json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]["admit"]

    chosen = {
        "policy": "reserve_expected",
        "order": "shortest_expected",
        "max_veto_s": 3.0,
        "max_wait_s": 60.0,
        "overflow_probability": 0.05,
    }
    default = InstanceSettings(Role.DECODE, "d0", "http://d0").to_dict()["admit"]
    assert printed(bounds) == default | chosen
    assert printed([]) == default


# Checks before long work


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["instance", "m", "--role", "decode", "--admit-order", "lifo", "--print"],
            "admit.order='lifo': must be arrival or shortest_expected",
        ),
        (
            ["instance", "m", "--role", "decode", "--max-wait-s", "0", "--print"],
            "admit.max_wait_s=0.0: must be above 0 seconds",
        ),
        (
            ["instance", "m", "--role", "decode", "--max-wait-s", "nan", "--print"],
            "admit.max_wait_s=nan: must be above 0 seconds",
        ),
        (
            ["instance", "m", "--role", "decode", "--max-veto-s", "-1", "--print"],
            "admit.max_veto_s=-1.0: must be above 0 seconds",
        ),
        (
            ["instance", "m", "--role", "decode", "--overflow-probability", "0.5", "--print"],
            "admit.overflow_probability=0.5: must be between 0 and 0.5",
        ),
        (["serve", "m", "--overflow-probability", "0"], "admit.overflow_probability=0.0: must be between 0 and 0.5"),
        (["serve", "m", "--max-wait-s", "-1"], "admit.max_wait_s=-1.0: must be above 0 seconds"),
        (["serve", "m", "--admit-order", "x"], "admit.order='x': must be arrival or shortest_expected"),
        (["instance", "m", "--role", "decode", "--order", "lifo", "--print"], "order.policy='lifo' is unknown; known:"),
        (["instance", "m", "--role", "decode", "--admit", "x", "--print"], "admit.policy='x' is unknown"),
        (["instance", "./none", "--role", "decode", "--print"], "model folder './none' does not exist"),
        (["instance", "m", "--role", "decode", "--sched-batch", "0", "--print"], "order.sched_batch=0"),
        (["instance", "m", "--role", "decode", "--gateway", "gw:1", "--print"], "gateways='gw:1'"),
        (["serve", "m", "--dispatch", "x"], "dispatch.policy='x' is unknown"),
        (["serve", "a/b/c"], "model folder 'a/b/c' does not exist"),
        (["serve", "m", "--prediction-mode", "never"], "prediction.mode='never'"),
        (["serve", "m", "--drift-band", "1.5"], "drift_band=1.5: must be between 0 and 1"),
        (["serve", "m", "--drift-window", "0"], "drift_window is 0"),
        (["gateway", "--drift-window", "20000"], "drift_window=20000: must be 1 to 10000"),
        (["serve", "m", "--predictor", "models:/nobody@champion"], "or serve without one: --predictor none"),
        (["serve", "m", "--predictor", "none", "--", "--port", "1"], "--port is set by tetri"),
    ],
)
def test_bad_input_is_one_clear_line(app, arguments, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path)
    if arguments[0] == "serve":
        arguments = [*arguments[:2], "--port", str(free_port()), *arguments[2:]]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigurationError), result.output
    assert words in str(result.exception) and "\n" not in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def make_model_folder(folder: Path) -> None:
    """A model folder `m`, as far as the checks look into it."""
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")


def test_a_name_that_the_hub_does_not_know_is_said_before_long_work(app, monkeypatch, tmp_path):
    import huggingface_hub

    def unknown(self, name, timeout):
        raise OSError("404: no such model\nmore")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unknown)
    result = CliRunner().invoke(app, ["serve", "nobody/nothing", "--predictor", "none", "--port", str(free_port())])
    assert isinstance(result.exception, ConfigurationError), result.output
    assert "'nobody/nothing'" in str(result.exception) and "no such model" in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_predictor_of_another_target_is_refused(monkeypatch):
    from serving_plugin.predictor.registry import ResolvedModel

    resolved = ResolvedModel("/p", "length-predictor", "1", "opt-13b", "uri")
    monkeypatch.setattr("serving_plugin.predictor.registry.resolve_model_in_child", lambda uri, tracking: resolved)
    prediction = serve_cli._prediction("uri", None, "parallel", 512, False)
    with pytest.raises(ConfigurationError, match="trained for 'opt-13b', not 'tiny'"):
        serve_cli._check_predictor(prediction, "tiny")
    serve_cli._check_predictor(prediction, "facebook/opt-13b")
    serve_cli._check_predictor(replace(prediction, allow_other_target=True), "tiny")


def test_a_shadow_that_cannot_run_is_said_in_one_line_and_left_out(monkeypatch, capsys):
    from serving_plugin.predictor.registry import ResolvedModel

    def resolve(uri, tracking):
        if uri == "gone":
            raise ConfigurationError("registry has no gone")
        return ResolvedModel("/p", "length-predictor", "1", uri, uri)

    monkeypatch.setattr("serving_plugin.predictor.registry.resolve_model_in_child", resolve)
    for shadow, words in (("gone", "registry has no gone"), ("opt-13b", "trained for 'opt-13b', not 'tiny'")):
        prediction = serve_cli._prediction("tiny", None, "parallel", 512, False, shadow)
        assert not serve_cli._shadow_can_run(prediction, "tiny")
        line = capsys.readouterr().err
        assert line.startswith("no shadow predictor runs: ") and words in line and line.count("\n") == 1
        assert "--shadow-predictor" in line
    plan = replace(PLAN, settings=replace(SETTINGS, prediction=prediction))
    assert serve_cli._without_shadow(plan).settings.prediction == replace(prediction, shadow_model=None)
    for shadow in ("tiny", "none"):
        assert serve_cli._shadow_can_run(serve_cli._prediction("tiny", None, "parallel", 512, False, shadow), "tiny")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flag", ["--port", "--instance-port"])
def test_a_taken_port_is_named(flag):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway_port = port if flag == "--port" else free_port()
        instance = PLAN if flag == "--port" else replace(PLAN, port=port)
        plan = ClusterPlan(GatewaySettings(port=gateway_port), (instance,), Path("logs"))
        with pytest.raises(ConfigurationError, match=f"port {port} is taken .*{flag}"):
            checks.check_cluster(plan)


def test_too_little_memory_is_told_per_instance(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    plan = replace(PLAN, model=str(tmp_path))
    need = checks.instance_bytes(plan)
    assert need == checks.INSTANCE_BASE_BYTES + 1000 + checks.GIB
    checks.check_memory([plan, plan], 2 * need)
    predicting = replace(plan, settings=replace(SETTINGS, prediction=PredictionSettings("a", "b")))
    assert checks.instance_bytes(predicting) == need + 2 * checks.PREDICTOR_BYTES
    with pytest.raises(ConfigurationError, match=r"prefill-0 3\.9.*lower --kv-cache-gib"):
        checks.check_memory([plan], need - 1)


def test_models_are_folders_or_names(tmp_path):
    assert checks.check_model("facebook/opt-125m") is False
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        checks.check_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 512}')
    assert checks.check_model(str(tmp_path)) is True
    assert checks.max_model_len(str(tmp_path), 2048) == 512
    assert checks.max_model_len("facebook/opt-125m", 2048) == 2048


def test_devices_are_handed_out_in_groups():
    assert checks.device_groups(2, 2, ["0", "1", "4", "5"]) == [("0", "1"), ("4", "5")]
    with pytest.raises(ConfigurationError, match="need 4 GPUs, 3 found"):
        checks.device_groups(2, 2, ["0", "1", "2"])


def test_gateway_settings_are_bounded():
    with pytest.raises(ConfigurationError, match="max_open_requests is 0"):
        GatewaySettings(max_open_requests=0)


# A cluster's life

_SERVER = """
import http.server, sys, threading, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("child says hello", flush=True)
if sys.argv[2] == "dies":
    threading.Timer(1.0, os._exit, (7,)).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def child(tmp_path, name, port, mode="lives") -> dict[str, ChildSpec]:
    command = (sys.executable, "-c", _SERVER, str(port), mode)
    return {f"http://127.0.0.1:{port}/": ChildSpec(name, command, tmp_path / f"{name}.log", {})}


class Console:
    """Collects what a user would see."""

    def __init__(self) -> None:
        self.waiting: list[set[str]] = []
        self.num_ready = 0
        self.failures: list[str] = []

    def run(self, specs, timeout_s=20.0) -> int:
        def on_ready() -> None:
            self.num_ready += 1

        return run_cluster(
            specs, timeout_s, lambda waiting, _: self.waiting.append(waiting), on_ready, self.failures.append
        )


def test_a_child_that_dies_ends_all_and_is_named_with_its_log(tmp_path):
    ports, console = (free_port(), free_port()), Console()
    specs = {**child(tmp_path, "prefill-0", ports[0]), **child(tmp_path, "decode-0", ports[1], "dies")}
    (tmp_path / "decode-0.log").write_text("an older run\n")
    assert console.run(specs) == 1
    assert console.num_ready == 1 and console.waiting[-1] == set()
    (failure,) = console.failures
    assert "decode-0 ended with code 7" in failure and "child says hello" in failure and "older" not in failure
    assert (tmp_path / "decode-0.log.previous").read_text() == "an older run\n"
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_child_that_never_starts_is_named(tmp_path):
    spec = ChildSpec("prefill-0", (sys.executable, "-c", "print('no kernel'); exit(3)"), tmp_path / "p.log", {})
    console = Console()
    assert console.run({"http://127.0.0.1:1/": spec}) == 1
    assert "prefill-0 ended with code 3" in console.failures[0] and "no kernel" in console.failures[0]


def test_a_start_that_takes_too_long_ends_all(tmp_path):
    spec = ChildSpec("slow", (sys.executable, "-c", "import time; time.sleep(60)"), tmp_path / "slow.log", {})
    with pytest.raises(ConfigurationError, match="slow not ready after 1 s"):
        Console().run({"http://127.0.0.1:1/": spec}, timeout_s=1.0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_with_exit_code_0(tmp_path, signum):
    port = free_port()
    script = textwrap.dedent(
        f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_launcher import child
        from serving_plugin.control.launcher import run_cluster
        specs = child(Path({str(tmp_path)!r}), "decode-0", {port})
        quiet = lambda *a: None
        sys.exit(run_cluster(specs, 20.0, quiet, lambda: print("ready", flush=True), quiet))
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        started_s = time.monotonic()
        process.send_signal(signum)
        assert process.wait(10) == 0
        assert time.monotonic() - started_s < 10
    assert checks.preflight.port_problem(port, "") is None


def test_tetri_serve_from_start_to_ctrl_c(tmp_path):
    """The whole command with a stand-in for vLLM: ready line, a request through both legs, Ctrl-C, nothing left."""
    here, port = Path(__file__).parent, free_port()
    make_model_folder(tmp_path)
    fake = tmp_path / "vllm"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} {here / "fake_vllm.py"} "$@"\n')
    fake.chmod(0o755)
    script = textwrap.dedent(
        f"""
        import typer
        from serving_plugin.cli import serve
        from serving_plugin.control import checks
        serve.vllm_executable = lambda: {str(fake)!r}
        checks.detect_device = lambda: checks.Device.CPU
        checks.check_cpu_host = lambda instances: None
        app = typer.Typer()
        serve.register(app)
        app()
        """
    )
    arguments = ["serve", "m", "--predictor", "none", "--port", str(port), "--log-dir", "logs", "--decode", "2"]
    command = [sys.executable, "-c", script, *arguments, "--", "--dtype", "float32"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout.readline().startswith(f"ready: http://127.0.0.1:{port}/v1")
            body = json.dumps({"model": "m", "prompt": "hi"}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
            with urllib.request.urlopen(request, timeout=10) as response:
                assert json.load(response)["choices"][0]["text"] == "abc"
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/tetri/requests", timeout=10) as response:
                (record,) = json.load(response)["requests"]
            assert record["prefill_instance"] == "prefill-0"
            assert record["decode_instance"] in ("decode-0", "decode-1")
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == [
        "decode-0.log",
        "decode-1.log",
        "gateway.log",
        "prefill-0.log",
    ]
    for used in (port, port + 100, port + 101, port + 102):
        assert checks.preflight.port_problem(used, "") is None


# The gateway's own process


def test_the_gateway_is_light():
    """No torch, vllm, transformers or mlflow in the process, and well below 300 MB resident."""
    script = (
        "import json, pathlib, sys; from serving_plugin.control import gateway; "
        "heavy = sorted({'torch', 'vllm', 'transformers', 'mlflow', 'numpy', 'onnxruntime'} & set(sys.modules)); "
        "status = pathlib.Path('/proc/self/status').read_text(); "  # ru_maxrss would count the forking parent
        "print(json.dumps([heavy, int(status.split('VmHWM:')[1].split()[0])]))"
    )
    heavy, peak_kib = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    assert heavy == [] and peak_kib < 150 * 1024


def test_a_gateway_process_serves_and_stops(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "serving_plugin.control.gateway", "--settings", json.dumps({"port": port})]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        assert f"http://127.0.0.1:{port}" in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('{"port": 0}', "port is 0"),
        ('{"colour": 1}', "colour"),
        ("{", "--settings"),
        ('{"place": "x"}', "place.policy='x'"),
    ],
)
def test_a_gateway_with_bad_settings_says_so_in_one_line(settings, words):
    command = [sys.executable, "-m", "serving_plugin.control.gateway", "--settings", settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_wildcard_addresses_are_reached_over_loopback():
    assert [base_url(host, 1) for host in ("0.0.0.0", "::", "10.0.0.1")] == [
        "http://127.0.0.1:1",
        "http://127.0.0.1:1",
        "http://10.0.0.1:1",
    ]
