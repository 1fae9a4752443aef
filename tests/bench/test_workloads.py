"""Workloads: the right class, the right arrivals, the same again for the same seed, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_plugin.bench.workloads import (
    LengthSource,
    WorkloadName,
    WorkloadSpec,
    arrival_times_s,
    load_tokenizer,
    make_workload,
    model_context_tokens,
    parse_workload_name,
    read_pairs,
)
from serving_plugin.core.errors import ConfigurationError

SPEC = WorkloadSpec(WorkloadName.MIXED, 12, 0, 512, rate_per_s=2.0, max_output_tokens=80)


def draw(spec: WorkloadSpec, chats_path: Path, model_folder: Path):
    return make_workload(spec, read_pairs(str(chats_path)), load_tokenizer(model_folder), "chats")


@pytest.mark.parametrize("name", [w for w in WorkloadName if w is not WorkloadName.MIXED])
def test_every_request_is_of_the_named_class(name, chats_path, model_folder):
    workload = draw(replace(SPEC, name=name, num_requests=5), chats_path, model_folder)
    assert workload.spec.effective_scale == 0.25
    assert (workload.spec.heavy_prefill_over_tokens, workload.spec.heavy_decode_over_tokens) == (128, 32)
    for request in workload.requests:
        assert request.workload_class == name
        assert (request.num_prompt_tokens > 128) == name.startswith("hp")
        assert (request.num_output_tokens > 32) == name.endswith("hd")
        assert len(request.prompt.split()) == request.num_prompt_tokens


def test_mixed_is_a_sample_of_all_classes_with_capped_outputs(chats_path, model_folder):
    workload = draw(replace(SPEC, num_requests=50), chats_path, model_folder)
    assert len({request.workload_class for request in workload.requests}) == 4
    assert max(request.num_output_tokens for request in workload.requests) == 80
    assert workload.facts()["num_capped_outputs"] == workload.num_capped_outputs > 0
    assert len({request.prompt for request in workload.requests}) == 50


def test_same_seed_same_workload_other_seed_another(chats_path, model_folder):
    first = draw(SPEC, chats_path, model_folder)
    assert draw(SPEC, chats_path, model_folder) == first
    assert draw(replace(SPEC, seed=1), chats_path, model_folder).requests != first.requests


@pytest.mark.parametrize("name", list(WorkloadName))
def test_paper_lengths_are_real_text_cut_to_the_drawn_length(name, chats_path, model_folder):
    spec = replace(SPEC, name=name, num_requests=4, length_source=LengthSource.PAPER, scale=0.125)
    workload = draw(spec, chats_path, model_folder)
    for request in workload.requests:
        assert len(request.prompt.split()) == request.num_prompt_tokens
        assert spec.accepts(request.num_prompt_tokens, request.num_output_tokens)


def test_arrivals_are_poisson_and_do_not_depend_on_the_workload():
    times_s = arrival_times_s(4000, 2.0, seed=3)
    assert times_s == sorted(times_s) and times_s[0] == 0
    assert times_s[-1] / 3999 == pytest.approx(0.5, rel=0.05)
    assert arrival_times_s(10, 2.0, seed=3) == times_s[:10]
    assert arrival_times_s(3, None, seed=3) == [0.0, 0.0, 0.0]


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from(list(WorkloadName)))
def test_the_four_classes_part_the_plane(num_prompt, num_output, name):
    spec = WorkloadSpec(WorkloadName.MIXED, 1, 0, 4096, max_output_tokens=2048)
    classes = [w for w in WorkloadName if w is not WorkloadName.MIXED]
    accepting = [w for w in classes if replace(spec, name=w).accepts(num_prompt, num_output)]
    fits = 1 <= num_prompt <= spec.prompt_limit_tokens and 2 <= num_output <= 2048
    assert len(accepting) == int(fits)
    assert spec.accepts(num_prompt, num_output) == fits


def test_prepared_rows_are_read_and_a_row_without_reply_is_named(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "hello", "reply": "good day"}) + "\n")
    assert [(pair.id, pair.prompt, pair.reply) for pair in read_pairs(str(path))] == [("a", "hello", "good day")]
    path.write_text(json.dumps({"id": "a", "prompt": "hello"}) + "\n")
    with pytest.raises(ConfigurationError, match="line 1 has no reply"):
        read_pairs(str(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_requests": 0}, "--num-requests 0"),
        ({"rate_per_s": 0.0}, "--rate 0.0"),
        ({"max_output_tokens": 1}, "--max-output-tokens 1"),
        ({"max_output_tokens": 512}, "no room for a prompt"),
        ({"scale": 2.0}, "--scale 2.0"),
        ({"name": WorkloadName.HPLD, "max_prompt_tokens": 100}, "needs prompts over 128"),
        ({"name": WorkloadName.LPHD, "max_output_tokens": 30}, "needs outputs over 32"),
    ],
)
def test_a_workload_that_cannot_exist_is_refused(change, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(SPEC, **change)


def test_too_little_data_is_said_with_the_number_found(chats_path, model_folder):
    with pytest.raises(ConfigurationError, match=r"holds only \d+ of 5000 requests for workload mixed"):
        draw(replace(SPEC, num_requests=5000), chats_path, model_folder)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere"):
        read_pairs(str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigurationError, match="not a folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        model_context_tokens(tmp_path)
    with pytest.raises(ConfigurationError, match="unknown workload 'chat'; known are lpld, lphd, hpld, hphd, mixed"):
        parse_workload_name("chat")
