"""Stage generate: the target's replies to the prepared prompts, by vLLM offline, in shards that survive a kill.

Reads `target.*`, `generate.*`, `seed` and data/prepared; writes data/generated/{shard-00000.jsonl,...} and,
from them, replies.jsonl with one row for each prompt asked for.
A shard is written whole or not at all and never made twice: after a kill the stage goes on with the prompts left over.
Shards made under other settings are moved beside the folder, never mixed in. DVC keeps the folder (`persist: true`).

    python -m pipeline.generate
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.files import progress, read_json_lines, run_stage, write_json, write_json_lines
from pipeline.params import GenerateParams, Params, TargetParams, load_params
from pipeline.prepare import PREPARED_FOLDER
from serving_plugin.core.errors import ConfigurationError

GENERATED_FOLDER = Path("data/generated")
REPLIES_FILE = "replies.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prepared prompt and where it belongs."""

    id: str
    root_id: str
    split: str
    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine answered; both counts are lengths of the engine's own token ids."""

    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    text: str


class Target(Protocol):
    """Answers prompts; vLLM in the stage, a stand-in in tests."""

    def encode(self, prompt: str) -> list[int]:
        """Token ids of the prompt as the engine will see it (chat template included)."""
        ...

    def reply(self, prompts_token_ids: Sequence[list[int]]) -> list[Reply]:
        """One reply for each prompt, in order."""
        ...


def choose_prompts(folder: Path, splits: Sequence[str], num_prompts: int | None, seed: int) -> list[Prompt]:
    """`num_prompts` prepared prompts (all if None) of `splits` in proportion, the same ones for the same seed.

    Ordered by a hash of the id: asking for more later keeps the ones already answered at the front.
    """
    prompts = [
        Prompt(row["id"], row["root_id"], split, row["prompt"])
        for split in splits
        for row in read_json_lines(folder / f"{split}.jsonl", "prepare")
    ]
    prompts.sort(key=lambda prompt: hashlib.sha256(f"{seed}\x00{prompt.id}".encode()).digest())
    return prompts[:num_prompts]


def fingerprint(target: TargetParams, params: GenerateParams, seed: int) -> dict[str, Any]:
    """The settings on which a reply depends; shards that differ in one of them are not mixed."""
    return {
        "target": target.location,
        "target_files": _folder_digest(Path(target.location)),
        "dtype": target.dtype,
        "seed": seed,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": params.max_tokens,
        "max_model_len": params.max_model_len,
    }


def generate(
    prompts: Sequence[Prompt], settings: dict[str, Any], params: GenerateParams, folder: Path, target: Target | None
) -> dict[str, Any]:
    """Answer every prompt that has no row in `folder` yet; returns the report.

    Args:
        target: None starts vLLM, and only if something is left to do.
    """
    _use_shards_of(folder, settings)
    digest_of = {prompt.id: _digest(prompt) for prompt in prompts}
    done = {(row["id"], row["prompt_sha256"]) for row in generated_rows(folder)}
    missing = [prompt for prompt in prompts if (prompt.id, digest_of[prompt.id]) not in done]
    if done and missing:
        progress(f"generate: {len(prompts) - len(missing)} of {len(prompts)} prompts are answered already")
    started_s, num_tokens = time.monotonic(), 0
    for start in range(0, len(missing), params.shard_size):
        target = target or VllmTarget(settings, params)
        shard = missing[start : start + params.shard_size]
        rows = _answer(shard, target, params)
        write_json_lines(folder / f"shard-{_next_number(folder):05d}.jsonl", rows)
        num_tokens += sum(row["output_tokens"] for row in rows)
        elapsed_s = time.monotonic() - started_s
        num_done = start + len(shard)
        progress(
            f"generate: {num_done}/{len(missing)} prompts, {num_tokens / elapsed_s:.0f} tokens/s, "
            f"about {elapsed_s / num_done * (len(missing) - num_done):.0f} s left"
        )
    report = _collect(prompts, digest_of, folder)
    write_json(folder / "report.json", report)
    return report


def generated_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Rows of all shards of the present settings, in the order in which they were made."""
    for path in sorted(folder.glob("shard-*.jsonl")):
        yield from read_json_lines(path, "generate")


def vllm_arguments(settings: dict[str, Any], params: GenerateParams, *, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`. Eager on CPU: compiling takes longer than a small run."""
    arguments = {
        "model": settings["target"],
        "dtype": settings["dtype"],
        "seed": settings["seed"],
        "max_model_len": params.max_model_len,
        "max_num_seqs": params.max_num_seqs,
        "tensor_parallel_size": params.tensor_parallel_size,
        "disable_log_stats": True,
    }
    if on_gpu:
        return {**arguments, "gpu_memory_utilization": params.gpu_memory_utilization}
    return {**arguments, "enforce_eager": True}


def engine_environment(location: str, params: GenerateParams, *, on_gpu: bool) -> dict[str, str]:
    """Environment of the engine: no usage report, no look-up on the hub for a folder, a KV cache of known size on CPU.

    `VLLM_PLUGINS` is emptied: the serving plugin has no business in an offline run.
    """
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "WARNING"}
    if Path(location).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if not on_gpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(params.kv_cache_gib)
        if params.tensor_parallel_size == 1:
            # One process on all cores: the engine's own processes would take a core to wait for each other.
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return environment


class VllmTarget:
    """vLLM's offline engine. Imports and starts when made, so a run with nothing to do stays quick."""

    def __init__(self, settings: dict[str, Any], params: GenerateParams) -> None:
        on_gpu = _has_gpu()
        os.environ.update(engine_environment(settings["target"], params, on_gpu=on_gpu))
        progress(f"generate: starting vLLM with {settings['target']}")
        from vllm import LLM, SamplingParams

        self._llm = LLM(**vllm_arguments(settings, params, on_gpu=on_gpu))
        self._tokenizer = self._llm.get_tokenizer()
        # No per-request seed: it kills vLLM 0.32's CPU engine. The engine's own seed makes a run repeatable.
        self._sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_tokens,
        )

    def encode(self, prompt: str) -> list[int]:
        """Through the chat template if the tokenizer has one; else the plain prompt with its special tokens."""
        return encode_prompt(self._tokenizer, prompt)

    def reply(self, prompts_token_ids: Sequence[list[int]]) -> list[Reply]:
        """One reply for each prompt, in order."""
        prompts: Any = [{"prompt_token_ids": ids} for ids in prompts_token_ids]
        answered = self._llm.generate(prompts, self._sampling, use_tqdm=False)
        return [
            Reply(
                num_prompt_tokens=len(one.prompt_token_ids or ()),
                num_output_tokens=len(one.outputs[0].token_ids),
                finish_reason=str(one.outputs[0].finish_reason),
                text=one.outputs[0].text,
            )
            for one in answered
        ]


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids as a chat server would make them: one user turn in the chat template, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode(prompt))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer.encode(text, add_special_tokens=False))  # the template wrote them


def _answer(shard: Sequence[Prompt], target: Target, params: GenerateParams) -> list[dict[str, Any]]:
    """Rows of a shard. A prompt without room for a whole reply gets a row that says so: it is not asked again."""
    encoded = [target.encode(prompt.text) for prompt in shard]
    room = params.max_model_len - params.max_tokens
    fits = [0 < len(ids) <= room for ids in encoded]
    replies = iter(target.reply([ids for ids, fit in zip(encoded, fits, strict=True) if fit]) if any(fits) else [])
    rows = []
    for prompt, ids, fit in zip(shard, encoded, fits, strict=True):
        reply = next(replies) if fit else Reply(len(ids), 0, "prompt_too_long", "")
        rows.append(
            {
                "id": prompt.id,
                "root_id": prompt.root_id,
                "split": prompt.split,
                "prompt": prompt.text,
                "prompt_sha256": _digest(prompt),
                "prompt_tokens": reply.num_prompt_tokens,
                "output_tokens": reply.num_output_tokens,
                "finish_reason": reply.finish_reason,
                "text": reply.text,
            }
        )
    return rows


def _collect(prompts: Sequence[Prompt], digest_of: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Write replies.jsonl: a row for each wanted prompt, in their order; shards of a larger run may hold more."""
    rows = {row["id"]: row for row in generated_rows(folder) if digest_of.get(row["id"]) == row["prompt_sha256"]}
    write_json_lines(folder / REPLIES_FILE, (rows[prompt.id] for prompt in prompts))
    return {
        "num_prompts": len(rows),
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows.values()).items())),
        "num_output_tokens": sum(row["output_tokens"] for row in rows.values()),
    }


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(f"{prompt.split}\x00{prompt.text}".encode()).hexdigest()[:16]


def _folder_digest(folder: Path) -> str | None:
    """Digest of a local target's small files and of all sizes: another model under the same path is noticed."""
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\x00{size}\x00".encode())
        if size < 1 << 20:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _next_number(folder: Path) -> int:
    numbers = [int(path.stem.removeprefix("shard-")) for path in folder.glob("shard-*.jsonl")]
    return max(numbers, default=-1) + 1


def _use_shards_of(folder: Path, settings: dict[str, Any]) -> None:
    """Move shards of other settings to a folder beside, and bring back those that these settings made before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    shards = sorted(folder.glob("shard-*.jsonl"))
    if old == settings:
        return
    if shards:
        changed = sorted(key for key in settings if old is None or old.get(key) != settings[key])
        aside = _aside(folder, old)
        aside.mkdir(exist_ok=True)
        for shard in shards:
            shard.replace(aside / shard.name)
        progress(
            f"generate: {len(shards)} shards were made under other settings ({', '.join(changed)}): moved to {aside}, "
            f"where they wait for those settings; delete it when you do not need them"
        )
    write_json(path, settings)  # before any shard of theirs is here: a kill must not leave shards under other settings
    earlier = _aside(folder, settings)
    if earlier.is_dir():
        for shard in sorted(earlier.glob("shard-*.jsonl")):
            shard.replace(folder / shard.name)
        earlier.rmdir()
        progress(f"generate: shards of these settings brought back from {earlier}")


def _aside(folder: Path, settings: Any) -> Path:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return folder.with_name(f"{folder.name}-{digest}")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(params: Params, prepared: Path = PREPARED_FOLDER, folder: Path = GENERATED_FOLDER) -> dict[str, Any]:
    """Run the stage; nothing is asked when `generate.num_prompts` is 0."""
    prompts: list[Prompt] = []
    if params.generate.num_prompts != 0:
        _check_target(params.target)
        prompts = choose_prompts(prepared, params.generate.splits, params.generate.num_prompts, params.seed)
    settings = fingerprint(params.target, params.generate, params.seed)
    report = generate(prompts, settings, params.generate, folder, None)
    progress(f"generate: {report['num_prompts']} prompts, finished by {report['finish_reasons'] or 'none asked'}")
    return report


def _check_target(target: TargetParams) -> None:
    from pipeline.target import MADE_TARGETS

    is_path = target.path is None or target.location.startswith((".", "/", "~")) or target.location.count("/") != 1
    if is_path and not (Path(target.location) / "config.json").is_file():
        cure = "run `dvc repro target`" if target.name in MADE_TARGETS else "correct target.path in params.yaml"
        raise ConfigurationError(f"target {target.location!r} is no model folder (config.json is missing): {cure}")


def main() -> None:
    """Entry point."""
    run(load_params())


if __name__ == "__main__":
    run_stage(main)
