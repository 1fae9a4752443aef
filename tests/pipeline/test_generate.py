"""Generate: shards that survive a kill, never made twice, never mixed; the engine's own counts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.files import read_json_lines, write_json_lines
from pipeline.generate import (
    Prompt,
    Reply,
    choose_prompts,
    encode_prompt,
    engine_environment,
    fingerprint,
    generate,
    run,
    vllm_arguments,
)
from pipeline.params import TargetParams, load_profile
from pipeline.target import TINY_OPT, load_tokenizer, make_target
from serving_plugin.core.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
PARAMS = dataclasses.replace(load_profile("ci").generate, max_tokens=8, max_model_len=64, shard_size=4)
SETTINGS: dict[str, Any] = {"target": "t", "temperature": 0.7}
PROMPTS = [Prompt(f"r{i}_0", f"r{i}", "train", "word " * (i + 1)) for i in range(10)]


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


class Echo:
    """A target whose tokens are words; dies when it is asked for more shards than it may answer."""

    def __init__(self, num_shards: int = 100) -> None:
        self.asked: list[int] = []
        self.num_shards = num_shards

    def encode(self, prompt: str) -> list[int]:
        return list(range(len(prompt.split())))

    def reply(self, prompts_token_ids: Sequence[list[int]]) -> list[Reply]:
        if self.num_shards == 0:
            raise Killed
        self.num_shards -= 1
        self.asked += [len(ids) for ids in prompts_token_ids]
        return [Reply(len(ids), 3, "stop", f"reply to {len(ids)}") for ids in prompts_token_ids]


def replies(folder: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / "replies.jsonl", "generate"))


def test_rows_hold_the_engines_counts_in_the_order_asked(tmp_path: Path) -> None:
    report = generate(PROMPTS, SETTINGS, PARAMS, tmp_path, Echo())
    rows = replies(tmp_path)
    assert [row["id"] for row in rows] == [prompt.id for prompt in PROMPTS]
    assert [row["prompt_tokens"] for row in rows] == list(range(1, 11))
    assert {row["output_tokens"] for row in rows} == {3}
    assert report == {"num_prompts": 10, "finish_reasons": {"stop": 10}, "num_output_tokens": 30}
    assert sorted(path.name for path in tmp_path.glob("shard-*")) == [f"shard-0000{i}.jsonl" for i in range(3)]


def test_after_a_kill_only_the_rest_is_asked(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        generate(PROMPTS, SETTINGS, PARAMS, tmp_path, Echo(num_shards=1))
    assert [path.name for path in tmp_path.glob("shard-*")] == ["shard-00000.jsonl"]
    rest = Echo()
    generate(PROMPTS, SETTINGS, PARAMS, tmp_path, rest)
    assert rest.asked == [5, 6, 7, 8, 9, 10]
    assert len(replies(tmp_path)) == 10


def test_a_finished_run_asks_nothing_and_needs_no_engine(tmp_path: Path) -> None:
    generate(PROMPTS, SETTINGS, PARAMS, tmp_path, Echo())
    before = (tmp_path / "replies.jsonl").read_bytes()
    generate(PROMPTS, SETTINGS, PARAMS, tmp_path, Echo(num_shards=0))
    assert (tmp_path / "replies.jsonl").read_bytes() == before


def test_more_and_fewer_prompts_keep_what_is_there(tmp_path: Path) -> None:
    generate(PROMPTS[:6], SETTINGS, PARAMS, tmp_path, Echo())
    more = Echo()
    generate(PROMPTS, SETTINGS, PARAMS, tmp_path, more)
    assert more.asked == [7, 8, 9, 10]
    generate(PROMPTS[:2], SETTINGS, PARAMS, tmp_path, Echo(num_shards=0))
    assert [row["id"] for row in replies(tmp_path)] == ["r0_0", "r1_0"]


def test_a_prompt_that_changed_under_its_id_is_asked_again(tmp_path: Path) -> None:
    generate(PROMPTS, SETTINGS, PARAMS, tmp_path, Echo())
    changed = [dataclasses.replace(PROMPTS[0], text="another text of five words"), *PROMPTS[1:]]
    again = Echo()
    generate(changed, SETTINGS, PARAMS, tmp_path, again)
    assert again.asked == [5]
    assert replies(tmp_path)[0]["prompt_tokens"] == 5


def test_other_settings_never_mix_and_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "generated"
    generate(PROMPTS, SETTINGS, PARAMS, folder, Echo())
    hotter = Echo()
    generate(PROMPTS, {**SETTINGS, "temperature": 1.0}, PARAMS, folder, hotter)
    assert len(hotter.asked) == 10
    assert "other settings (temperature): moved to" in capsys.readouterr().out
    generate(PROMPTS, SETTINGS, PARAMS, folder, Echo(num_shards=0))
    assert len(replies(folder)) == 10


def test_a_prompt_without_room_for_its_reply_is_counted_and_not_sent(tmp_path: Path) -> None:
    prompts = [
        Prompt("long_0", "long", "test", "word " * 57),
        *PROMPTS[:1],
        Prompt("fits_0", "fits", "test", "word " * 56),
    ]
    target = Echo()
    report = generate(prompts, SETTINGS, PARAMS, tmp_path, target)
    assert target.asked == [1, 56]
    assert report["finish_reasons"] == {"prompt_too_long": 1, "stop": 2}
    assert [row["output_tokens"] for row in replies(tmp_path)] == [0, 3, 3]


def test_chosen_prompts_are_stable_and_grow_at_the_end(tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = [{"id": f"{split}{i}_0", "root_id": f"{split}{i}", "prompt": "p", "reply": "r"} for i in range(40)]
        write_json_lines(tmp_path / f"{split}.jsonl", rows)
    few = choose_prompts(tmp_path, ["train", "test"], 10, 0)
    assert choose_prompts(tmp_path, ["train", "test"], 30, 0)[:10] == few
    assert {prompt.split for prompt in choose_prompts(tmp_path, ["train", "test"], 30, 0)} == {"train", "test"}
    assert {prompt.split for prompt in choose_prompts(tmp_path, ["test"], None, 0)} == {"test"}
    assert choose_prompts(tmp_path, ["train", "test"], 10, 1) != few


def test_missing_input_and_missing_target_name_the_stage_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="dvc repro prepare"):
        choose_prompts(tmp_path, ["train"], 1, 0)
    with pytest.raises(ConfigurationError, match="dvc repro target"):
        run(load_profile("ci"))
    assert not (tmp_path / "data").exists()


def test_no_prompts_wanted_is_an_empty_result_without_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(load_profile("cpu_full"))["num_prompts"] == 0
    assert replies(tmp_path / "data/generated") == []


def test_the_fingerprint_sees_another_model_under_the_same_path(tmp_path: Path) -> None:
    target = TargetParams("t", str(tmp_path), "float32")
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(target, PARAMS, 0)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert fingerprint(target, PARAMS, 0) != before


class WithTemplate:
    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return f"<s>{messages[0]['content']}</s>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *text.encode()]


class WithoutTemplate(WithTemplate):
    chat_template = ""


def test_the_chat_template_is_used_once_and_only_when_there_is_one() -> None:
    assert encode_prompt(WithTemplate(), "hi") == list(b"<s>hi</s>")
    assert encode_prompt(WithoutTemplate(), "hi") == [0, *b"hi"]


def test_the_engine_on_cpu_and_gpu() -> None:
    settings = {"target": "t", "dtype": "float32", "seed": 1}
    cpu, gpu = (vllm_arguments(settings, PARAMS, on_gpu=on_gpu) for on_gpu in (False, True))
    assert cpu["enforce_eager"] is True
    assert "gpu_memory_utilization" not in cpu
    assert gpu["gpu_memory_utilization"] == PARAMS.gpu_memory_utilization
    environment = engine_environment("t", PARAMS, on_gpu=False)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment
    assert "VLLM_CPU_KVCACHE_SPACE" not in engine_environment("t", PARAMS, on_gpu=True)


def test_a_local_target_is_never_looked_up_on_the_hub(tmp_path: Path) -> None:
    assert engine_environment(str(tmp_path), PARAMS, on_gpu=False)["HF_HUB_OFFLINE"] == "1"


ENGINE_SCRIPT = """
import json, sys
from pathlib import Path
from pipeline.generate import Prompt, fingerprint, generate
from pipeline.params import GenerateParams, TargetParams
params = GenerateParams(**json.loads(sys.argv[2]))
target = TargetParams("tiny-opt", sys.argv[1], "float32")
prompts = [Prompt(f"r{i}_0", f"r{i}", "train", f"Prompt number {i}") for i in range(6)]
generate(prompts, fingerprint(target, params, 0), params, Path(sys.argv[3]), None)
"""


@pytest.mark.engine
def test_vllm_answers_and_counts_its_own_tokens(tmp_path: Path) -> None:
    target = make_target(TINY_OPT, tmp_path / "tiny-opt")
    params = dataclasses.replace(PARAMS, splits=("train",), max_num_seqs=4)
    arguments = [str(target), json.dumps(dataclasses.asdict(params)), str(tmp_path / "generated")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ENGINE_SCRIPT, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = replies(tmp_path / "generated")
    assert len(rows) == 6
    tokenizer: Any = load_tokenizer(str(target))
    for row in rows:
        assert row["finish_reason"] in ("stop", "length")
        assert 1 <= row["output_tokens"] <= params.max_tokens
        assert (row["output_tokens"] == params.max_tokens) or row["finish_reason"] == "stop"
        assert row["prompt_tokens"] == len(tokenizer(row["prompt"])["input_ids"])
