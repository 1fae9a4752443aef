"""`tetri profile` without an engine: plan, saturation point, fit, cost model and its file, refusals, pictures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import serving_plugin.simulator.cost_model
from benchmarks import saturation as benchmark
from serving_plugin.cli import profile
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.engine import profile as measuring
from serving_plugin.engine import profile_figures
from serving_plugin.engine.offline_process import OfflineEngineError
from serving_plugin.engine.profile import (
    DecodeSample,
    PrefillSample,
    ProfilePlan,
    Samples,
    fit,
    plan_profile,
    saturation,
    summarise,
)
from serving_plugin.simulator.cost_model import MeasuredCostModel, read_cost_model

ENGINE = {"dtype": "bfloat16", "device": "cpu", "device_name": "cpu", "kv_cache_tokens": 4096}
SIZES = (16, 32, 64, 128, 256, 512, 1024)
PREFILL, DECODE = (20.0, 1.5, 0.0002), (30.0, 0.01, 2.0)


def canned(num_rounds: int = 2) -> Samples:
    """Steps that follow the coefficients above, the second round 10 % slower in both phases."""
    samples = Samples(ENGINE)
    for number in range(num_rounds):
        slow = 1.0 + 0.1 * number
        for n in SIZES:
            samples.prefill.append(PrefillSample(number, n, slow * (PREFILL[0] + PREFILL[1] * n + PREFILL[2] * n * n)))
        for context in (32, 128):
            for batch in (1, 2, 4, 8):
                read = batch * (context + 3)
                step_ms = slow * (DECODE[0] + DECODE[1] * read + DECODE[2] * batch)
                samples.decode.append(DecodeSample(number, batch, context, read, step_ms))
    return samples


def cost_model() -> MeasuredCostModel:
    samples = canned()
    return profile.cost_model_of("m", 0, samples, summarise(samples, 32), 32)


def test_the_plan_stays_within_all_limits():
    plan = plan_profile(1000, 48, 1100)
    assert plan.prefill_tokens == (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
    assert set(plan.decode_batches) == {32, 128, 512}  # 1,024 and what is put out would pass the context
    assert plan.decode_batches[32] == (1, 2, 4, 8, 16, 32) and plan.max_batch == 32
    assert all(batch * context <= 16_384 for context, batches in plan.decode_batches.items() for batch in batches)
    assert plan.max_model_len_tokens <= 1100
    assert plan.num_blocks * 32 >= 32 * (512 + measuring.GROWTH_TOKENS)
    short = plan_profile(1000, 48, 1100, is_short=True)
    assert (short.num_rounds, len(short.prefill_tokens), list(short.decode_batches)) == (1, 3, [32, 128])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((63, 64, 2048), "--max-tokens 63: must be 64 or more"),
        ((64, 1, 2048), "--max-batch 1: must be 2 to 1024"),
        ((64, 1025, 2048), "--max-batch 1025: must be 2 to 1024"),
        ((64, 64, 256), "context of 256 tokens is too short to profile: 288 are needed"),
    ],
)
def test_a_plan_that_shows_nothing_is_refused(limits, message):
    with pytest.raises(ConfigurationError, match=message):
        plan_profile(*limits)


def test_every_round_measures_every_point_in_an_order_of_its_own(monkeypatch):
    called: list[tuple[Any, ...]] = []

    class FakeProcess:
        def __init__(self, spec: Any) -> None:
            assert (spec.settings, spec.core, spec.max_num_seqs) == (None, 1, 4)
            assert spec.max_num_batched_tokens >= 128 and spec.num_blocks * 32 >= 4 * (32 + measuring.GROWTH_TOKENS)

        def __enter__(self) -> FakeProcess:
            return self

        def __exit__(self, *exception: object) -> None:
            called.append(("closed",))

        def wait_until_ready(self, timeout_s: float) -> None:
            assert timeout_s > 0

        def call(self, function: Any, *args: Any, timeout_s: float = 0.0) -> Any:
            called.append((function.__name__, *args))
            answers = {"describe": ENGINE, "prefill_ms": 1.0}
            return answers.get(function.__name__, [(b, 40 * b, 2.0) for b in (args[1:2] or [()])[0]])

    monkeypatch.setattr(measuring, "EngineProcess", FakeProcess)
    said: list[str] = []
    plan = ProfilePlan((16, 64, 128), {32: (1, 4), 1024: (1, 4)}, num_rounds=2)
    samples = measuring.measure("m", plan, 1, "auto", False, said.append)
    assert called[-1] == ("closed",)
    assert sorted(s.num_tokens for s in samples.of_round(1).prefill) == [16, 16, 64, 64, 128, 128]
    assert ("decode_ms", 1024, (1,), 4) in called  # four of 1,024 do not fit a pool of 4,096 tokens
    orders = [[s.num_tokens for s in samples.of_round(i).prefill] for i in (0, 1)]
    assert orders[0] != orders[1]
    assert said[:2] == ["loading m", "warming up"] and len(said) == 4


@pytest.mark.parametrize(
    ("rates", "tokens", "plateau"),
    [
        ({16: 100, 32: 200, 64: 390, 128: 400, 256: 400, 512: 400}, 64, 400),
        ({16: 100, 32: 200, 64: 300, 128: 400, 256: 380, 512: 350}, 128, 380),  # attention slows long prompts
        ({16: 100, 32: 200, 64: 300, 128: 400, 256: 405, 512: 900}, 128, 405),  # one lucky size
        ({16: 100, 32: 110, 64: 400}, 32, 110),
    ],
)
def test_saturation_is_the_smallest_size_near_the_plateau(rates, tokens, plateau):
    found, level = saturation({size: 1000.0 * size / rate for size, rate in rates.items()})
    assert (found, level) == (tokens, pytest.approx(plateau))


def test_fit_finds_the_coefficients_of_exact_steps():
    found = summarise(canned(1), 32)
    assert found.prefill_fit.coefficients == pytest.approx(PREFILL, rel=1e-6)
    assert found.decode_fit.coefficients == pytest.approx(DECODE, rel=1e-6)
    assert found.prefill_fit.max_error < 1e-9 and found.decode_fit.median_error < 1e-9


def test_fit_has_no_negative_coefficient_and_tells_its_error():
    falling = fit([(1, n, n * n) for n in (16, 64, 256)], [30.0, 20.0, 10.0])
    assert min(falling.coefficients) == 0.0 and max(falling.coefficients) > 0
    assert 0 < falling.median_error <= falling.max_error


def test_the_chunk_is_the_saturation_point_in_whole_blocks():
    found = summarise(canned(), 48)
    assert found.saturation_tokens == 128 and found.chunk_tokens == 144
    assert found.has_levelled_off
    assert "use --chunk-tokens 144 with `tetri serve`" in profile_figures.sentences(found)[0]


def test_a_curve_that_still_rises_is_called_so():
    samples = Samples(ENGINE, [PrefillSample(0, n, 100.0) for n in SIZES], canned().decode)
    found = summarise(samples, 32)
    assert not found.has_levelled_off
    assert "had not levelled off by 1024 tokens" in profile_figures.sentences(found)[1]


def test_a_busy_machine_is_called_so():
    quiet, samples = canned(), canned()
    for number, factor in enumerate((1.0, 1.5, 2.0, 2.5)):
        samples.prefill += [PrefillSample(number, s.num_tokens, factor * s.step_ms) for s in quiet.of_round(0).prefill]
    assert summarise(quiet, 32).spread < 0.1 and len(profile_figures.sentences(summarise(quiet, 32))) == 3
    assert "other work ran on this machine" in profile_figures.sentences(summarise(samples, 32))[1]


def test_an_engine_that_does_not_start_is_one_line(app, model_folder, tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise OfflineEngineError("the engine did not start: ValueError: no\n  such architecture")

    monkeypatch.setattr(measuring, "measure", fail)
    outcome = CliRunner().invoke(app, ["profile", str(model_folder), "--out", str(tmp_path / "p.json")])
    assert str(outcome.exception) == "the engine did not start: ValueError: no such architecture"


def test_the_cost_model_stands_on_the_standard_library():
    tree = ast.parse(Path(serving_plugin.simulator.cost_model.__file__).read_text())
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert froms | plain <= {
        "__future__", "json", "math", "collections.abc", "dataclasses", "pathlib", "typing",
        "serving_plugin.core.errors",
    }  # fmt: skip


def test_the_cost_model_predicts_what_it_was_fitted_to():
    found = cost_model()
    slow = 1.05  # the median of both rounds
    assert found.prefill_s([100, 50]) == pytest.approx(slow * (20 + 1.5 * 150 + 0.0002 * 12_500) / 1000)
    assert found.decode_s([35, 35]) == pytest.approx(slow * (30 + 0.01 * 70 + 4) / 1000)
    assert found.prefill_s([]) == found.decode_s([]) == 0.0
    assert found.num_cores == 1 and found.chunk_tokens == 128
    assert {"processor", "device_name"} <= set(found.machine) and "tetriserve" in found.versions


def test_the_cost_model_survives_its_file(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(cost_model().to_json()))
    assert read_cost_model(path) == cost_model()


def changed(key: str, value: Any) -> Any:
    """The file's content with one value changed; `key` such as `prefill.ms` or `decode_points.0.step_ms`."""
    data = json.loads(json.dumps(cost_model().to_json()))
    *way, last = (int(step) if step.isdigit() else step for step in key.split("."))
    at = data
    for step in way:
        at = at[step]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "cost model: [] is no JSON object"),
        ({}, "cost model: format=None is unknown, this version reads 1"),
        (("format", 2), "cost model: format=2 is unknown"),
        (("format", True), "cost model: format=True is unknown"),
        (("dtype", KeyError), "cost model: dtype is missing"),
        (("decode.ms", KeyError), "cost model: decode.ms is missing"),
        (("prefill_points.2.step_ms", KeyError), "cost model: prefill_points[2].step_ms is missing"),
        (("colour", 1), "cost model: colour is unknown; known are model, dtype"),
        (("model", 7), "cost model: model=7: must be a text"),
        (("machine", "big"), "cost model: machine='big': must be an object"),
        (("num_cores", True), "cost model: num_cores=True: must be a whole number, 1 or more"),
        (("chunk_tokens", 0), "cost model: chunk_tokens=0: must be a whole number, 1 or more"),
        (("chunk_tokens", 12.5), "cost model: chunk_tokens=12.5: must be a whole number"),
        (("plateau_tokens_per_s", "fast"), "cost model: plateau_tokens_per_s='fast': must be a number, 0 or more"),
        (("prefill", [1, 2, 3]), "cost model: prefill=[1, 2, 3]: must be an object"),
        (("prefill.ms", [1, -2, 3]), "cost model: prefill.ms[1]=-2: must be a number, 0 or more"),
        (("prefill.ms", [1, 2]), "cost model: prefill.ms=[1, 2]: must be three numbers"),
        (("prefill.ms", 5), "cost model: prefill.ms=5: must be a list of numbers"),
        (("decode.max_error", float("nan")), "cost model: decode.max_error=nan: must be a number"),
        (("decode_points", []), "cost model: decode_points=[]: must be a list that is not empty"),
        (("decode_points.0", 3), "cost model: decode_points[0]=3: must be an object"),
        (("decode_points.1.batch_size", "8"), "cost model: decode_points[1].batch_size='8': must be a whole number"),
        (("decode_points.1.step_ms", [1.0, None]), "cost model: decode_points[1].step_ms[1]=None: must be a number"),
    ],
)
def test_bad_cost_models_are_refused_in_one_line(data, message):
    given = changed(*data) if isinstance(data, tuple) else data
    with pytest.raises(ConfigurationError) as refused:
        MeasuredCostModel.from_json(given)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigurationError, match=r"profile.json cannot be read \(No such file or directory\)"):
        read_cost_model(path)
    path.write_text("{")
    with pytest.raises(ConfigurationError, match=r"profile.json is not JSON"):
        read_cost_model(path)
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"profile.json: cost model: format=None"):
        read_cost_model(path)


@pytest.fixture
def app() -> typer.Typer:
    """`profile` beside another command, as in `tetri`."""
    made = typer.Typer()
    profile.register(made)
    made.command("other")(lambda: None)
    return made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/model"], "model folder '/nowhere/model' does not exist"),
        (["EMPTY"], "has no config.json"),
        (["MODEL", "--out", "/dev/null/x.json"], "/dev/null/x.json cannot be written"),
        (["MODEL", "--plot", "/dev/null/x.png"], "/dev/null/x.png cannot be written"),
        (["MODEL", "--plot", "curves.txt"], "--plot curves.txt: must end in .png or .svg"),
        (["MODEL", "--dtype", "int3"], "--dtype 'int3' is unknown; known are auto, bfloat16"),
        (["MODEL", "--core", "9999"], "--core 9999 is none that this process may use"),
        (["MODEL", "--max-tokens", "8"], "--max-tokens 8: must be 64 or more"),
        (["MODEL", "--max-batch", "0"], "--max-batch 0: must be 2 to 1024"),
    ],
)
def test_bad_input_is_one_line(app, model_folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("measured all the same"))
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": str(model_folder), "EMPTY": str(tmp_path)}
    outcome = CliRunner().invoke(app, ["profile", *(names.get(a, a) for a in arguments)])
    assert isinstance(outcome.exception, ConfigurationError), outcome.output
    assert message in str(outcome.exception) and "\n" not in str(outcome.exception)


def test_a_profile_is_printed_written_and_drawn(app, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "measure", lambda *_: canned())
    out, plot = tmp_path / "new" / "profile.json", tmp_path / "new" / "curves.png"
    command = ["profile", str(model_folder), "--out", str(out), "--plot", str(plot)]
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 0, outcome.output
    assert "use --chunk-tokens 128 with `tetri serve` and `tetri instance`" in outcome.stdout
    assert "Prefill, one prompt a step" in outcome.stdout and "Decode step" in outcome.stdout
    assert f"cost model: {out}" in outcome.stderr
    assert read_cost_model(out).chunk_tokens == 128
    picture = plot.read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 200_000
    as_json = CliRunner().invoke(app, [*command, "--json"])
    assert MeasuredCostModel.from_json(json.loads(as_json.stdout)).chunk_tokens == 128


def test_the_benchmark_keeps_every_step_and_a_saturation_point_per_round(tmp_path):
    plan = ProfilePlan(SIZES, {32: (1, 2, 4, 8), 128: (1, 2, 4, 8)}, num_rounds=2)
    result = benchmark.result_of("m", plan, canned())
    assert result.is_complete
    assert result.saturation_tokens_by_round == [128, 128]
    first, second = result.plateau_tokens_per_s_by_round
    assert first == pytest.approx(1.1 * second)
    path, page, plot = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "r.svg"
    assert benchmark.deliver(result, path, page)
    content = json.loads(path.read_text())
    assert len(content["samples"]["prefill"]) == 14 and len(content["samples"]["decode"]) == 16
    assert content["profile"]["chunk_tokens"] == 128
    assert "128, 128" in page.read_text()
    benchmark.draw(result, plot)
    assert "<svg" in plot.read_text()
