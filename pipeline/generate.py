"""Stage generate: the target's replies to the prepared conversations, by vLLM offline, in shards that survive a kill.

Reads `target.*`, `generate.*`, `seed` and data/prepared; writes data/generated/{shard-00000.jsonl,...} and,
from them, replies.jsonl with one row for each sample of each turn asked for (the conversation is not copied: `root_id`
and `turn` find it in data/prepared).
A shard is written whole or not at all and never made twice: after a kill the stage goes on with the prompts left over.
Shards made under other settings are moved beside the folder, never mixed in. DVC keeps the folder (`persist: true`).

    python -m pipeline.generate
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from pipeline.files import progress, read_json_lines, run_stage, write_json, write_json_lines
from pipeline.params import GenerateParams, Params, TargetParams, load_params
from pipeline.prepare import PREPARED_FOLDER
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.conversation import Message, messages_of

GENERATED_FOLDER = Path("data/generated")
REPLIES_FILE = "replies.jsonl"
NOISE_BUCKET_TOKENS = 200
_FORMAT = 2  # of the rows, and of how a conversation becomes tokens
_PLACEHOLDER = re.compile("\ue000(\\d+)\ue001")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The messages in front of message `turn` of a conversation, to be answered `num_samples` times."""

    root_id: str
    split: str
    turn: int
    messages: tuple[Message, ...]
    num_samples: int = 1

    @property
    def id(self) -> str:
        """The id of labelled rows: `<root_id>:<turn>`."""
        return f"{self.root_id}:{self.turn}"

    @property
    def sha256(self) -> str:
        """Digest of the whole context: an answer to other messages under the same id is none to these."""
        context = json.dumps([[message.role, message.content] for message in self.messages])
        return hashlib.sha256(context.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine answered; both counts are lengths of the engine's own token ids."""

    num_prompt_tokens: int
    num_output_tokens: int
    finish_reason: str
    text: str


class Target(Protocol):
    """Answers conversations; vLLM in the stage, a stand-in in tests."""

    def encode(self, messages: Sequence[Message]) -> list[int] | None:
        """Token ids as the engine will see them (chat template included); None if the template refuses the roles."""
        ...

    def reply(self, prompts_token_ids: Sequence[list[int]]) -> list[Reply]:
        """One reply for each prompt, in order; equal prompts are sampled independently."""
        ...


def choose_prompts(folder: Path, params: GenerateParams, seed: int) -> list[Prompt]:
    """`params.num_prompts` turns (all if None) of `params.splits` in proportion, the same ones for the same seed.

    Ordered by a hash of the id: asking for more later keeps the ones already answered at the front, and so it does with
    the `num_resampled` that are answered several times.

    Raises:
        ConfigurationError: a prepared file is missing or holds no conversations in the present format.
    """
    places = [
        (split, str(row["root_id"]), messages_of(row["messages"]), int(turn))
        for split in params.splits
        for row in _prepared_rows(folder / f"{split}.jsonl")
        for turn in (row["replies"][:1] if params.turns == "first" else row["replies"])
    ]
    places.sort(key=lambda place: hashlib.sha256(f"{seed}\x00{place[1]}:{place[3]}".encode()).digest())
    return [
        Prompt(root_id, split, turn, messages[:turn], params.samples if number < params.num_resampled else 1)
        for number, (split, root_id, messages, turn) in enumerate(places[: params.num_prompts])
    ]


def _prepared_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(read_json_lines(path, "prepare"), start=1):
        if not row.keys() >= {"root_id", "messages", "replies"}:
            raise ConfigurationError(f"{path}:{number}: no conversation with its replies: run `dvc repro prepare`")
        yield row


def fingerprint(target: TargetParams, params: GenerateParams, seed: int) -> dict[str, Any]:
    """The settings on which a reply depends; shards that differ in one of them are not mixed."""
    return {
        "format": _FORMAT,
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
    """Answer every sample of every prompt that has no row in `folder` yet; returns the report.

    Args:
        target: None starts vLLM, and only if something is left to do.
    """
    _use_shards_of(folder, settings)
    digest_of = {prompt.id: prompt.sha256 for prompt in prompts}
    done = {(row["id"], row["sample"]) for row in generated_rows(folder) if _answers(row, digest_of)}
    wanted = [(prompt, sample) for prompt in prompts for sample in range(prompt.num_samples)]
    missing = [(prompt, sample) for prompt, sample in wanted if (prompt.id, sample) not in done]
    if done and missing:
        progress(f"generate: {len(wanted) - len(missing)} of {len(wanted)} replies are there already")
    started_s, num_tokens = time.monotonic(), 0
    for start in range(0, len(missing), params.shard_size):
        number = _next_number(folder)
        target = target or VllmTarget(settings, params, first_shard=number)
        shard = missing[start : start + params.shard_size]
        rows = _answer(shard, digest_of, target, params)
        write_json_lines(folder / f"shard-{number:05d}.jsonl", rows)
        num_tokens += sum(row["output_tokens"] for row in rows)
        elapsed_s = time.monotonic() - started_s
        num_done = start + len(shard)
        progress(
            f"generate: {num_done}/{len(missing)} replies, {num_tokens / elapsed_s:.0f} tokens/s, "
            f"about {elapsed_s / num_done * (len(missing) - num_done):.0f} s left"
        )
    report = _collect(wanted, digest_of, folder)
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
    """vLLM's offline engine. Imports and starts when made, so a run with nothing to do stays quick.

    Args:
        first_shard: number of the first shard it makes; moves the seed, since an engine that starts again under the
            same seed would draw the further samples of a prompt with the random numbers of its first one.
    """

    def __init__(self, settings: dict[str, Any], params: GenerateParams, *, first_shard: int = 0) -> None:
        on_gpu = _has_gpu()
        os.environ.update(engine_environment(settings["target"], params, on_gpu=on_gpu))
        progress(f"generate: starting vLLM with {settings['target']}")
        from vllm import LLM, SamplingParams

        settings = {**settings, "seed": settings["seed"] + first_shard}
        self._llm = LLM(**vllm_arguments(settings, params, on_gpu=on_gpu))
        self._tokenizer = self._llm.get_tokenizer()
        # No per-request seed: it kills vLLM 0.32's CPU engine. The engine's own seed makes a run repeatable.
        self._sampling = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            repetition_penalty=params.repetition_penalty,
            max_tokens=params.max_tokens,
        )

    def encode(self, messages: Sequence[Message]) -> list[int] | None:
        """Through the chat template if the tokenizer has one; None if it refuses such roles ("must alternate")."""
        from jinja2 import TemplateError

        try:
            return encode_prompt(self._tokenizer, messages)
        except TemplateError:
            return None

    def reply(self, prompts_token_ids: Sequence[list[int]]) -> list[Reply]:
        """One reply for each prompt, in order; equal prompts are sampled independently."""
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


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation whose next message is the assistant's: what a chat server would make of it.

    But what a user writes stays text: a literal `<|im_end|>` in a message is spelt out, not the control token. With a
    template that changes the contents (beyond trimming them) this cannot be told apart, and the rendering is taken
    as it is. Without a template: the contents, one below the other, behind the tokenizer's own special tokens.
    """
    contents = [message.content for message in messages]
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer.encode("\n".join(contents), split_special_tokens=True))
    special = sorted((str(token) for token in tokenizer.added_tokens_decoder.values() if token.special), key=len)
    text = _render(tokenizer, messages)
    if any(word in content for word in special for content in contents):
        frame = _render(tokenizer, [Message(m.role, f"\ue000{i}\ue001") for i, m in enumerate(messages)])
        for written in (contents, [content.strip() for content in contents]):
            if _filled(frame, written) == text:
                return _encode_framed(tokenizer, frame, written, special)
    return list(tokenizer.encode(text, add_special_tokens=False))  # the template wrote them


def _render(tokenizer: Any, messages: Sequence[Message]) -> str:
    plain = [{"role": message.role, "content": message.content} for message in messages]
    return str(tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False))


def _encode_framed(tokenizer: Any, frame: str, contents: Sequence[str], special: Sequence[str]) -> list[int]:
    """The frame's special tokens as such, and all that lies between two of them as one ordinary text."""
    ids: list[int] = []
    longest_first = "|".join(re.escape(word) for word in reversed(special))
    for number, piece in enumerate(re.split(f"({longest_first})", frame)):
        if number % 2:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
        elif piece:
            ids += tokenizer.encode(_filled(piece, contents), add_special_tokens=False, split_special_tokens=True)
    return ids


def _filled(frame: str, contents: Sequence[str]) -> str:
    return _PLACEHOLDER.sub(lambda found: contents[int(found[1])], frame)


def _answer(
    shard: Sequence[tuple[Prompt, int]], digest_of: Mapping[str, str], target: Target, params: GenerateParams
) -> list[dict[str, Any]]:
    """Rows of a shard. What cannot be asked gets a row that says so: it is not tried again."""
    prompts = {prompt.id: prompt for prompt, _ in shard}
    encoded = {id_: target.encode(prompt.messages) for id_, prompt in prompts.items()}
    unasked = {id_: _why_not_asked(ids, params) for id_, ids in encoded.items()}
    asked = [encoded[prompt.id] or [] for prompt, _ in shard if unasked[prompt.id] is None]
    replies = iter(target.reply(asked) if asked else [])
    rows = []
    for prompt, sample in shard:
        reply = unasked[prompt.id] or next(replies)
        rows.append(
            {
                "id": prompt.id,
                "root_id": prompt.root_id,
                "split": prompt.split,
                "turn": prompt.turn,
                "sample": sample,
                "prompt_sha256": digest_of[prompt.id],
                "prompt_tokens": reply.num_prompt_tokens,
                "output_tokens": reply.num_output_tokens,
                "finish_reason": reply.finish_reason,
                "text": reply.text,
            }
        )
    return rows


def _why_not_asked(ids: list[int] | None, params: GenerateParams) -> Reply | None:
    """An empty reply with the reason in place of the engine's: no room for a whole reply, say."""
    if ids is None:
        return Reply(0, 0, "refused_by_template", "")
    if not ids:
        return Reply(0, 0, "prompt_empty", "")
    too_long = len(ids) > params.max_model_len - params.max_tokens
    return Reply(len(ids), 0, "prompt_too_long", "") if too_long else None


def _answers(row: Mapping[str, Any], digest_of: Mapping[str, str]) -> bool:
    return bool(digest_of.get(row["id"]) == row["prompt_sha256"])


def _collect(wanted: Sequence[tuple[Prompt, int]], digest_of: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Write replies.jsonl: a row for each wanted sample, in their order; shards of a larger run may hold more.

    The split is the present one: a reply does not depend on it, and a conversation may have moved since.
    """
    made = {(row["id"], row["sample"]): row for row in generated_rows(folder) if _answers(row, digest_of)}
    rows = [made[prompt.id, sample] | {"split": prompt.split} for prompt, sample in wanted]
    write_json_lines(folder / REPLIES_FILE, rows)
    return {
        "num_prompts": len(digest_of),
        "num_replies": len(rows),
        "replies_per_sample_number": [count for _, count in sorted(Counter(row["sample"] for row in rows).items())],
        "finish_reasons": dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
        "num_output_tokens": sum(row["output_tokens"] for row in rows),
        "noise": noise_of(rows),
    }


def noise_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How often two replies of the target to one prompt have lengths in one bucket; None without such pairs.

    A reply that was cut off counts with the length that it had; how many pairs have one is said beside.
    """
    replies: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["output_tokens"]:
            replies.setdefault(row["id"], []).append(row)
    pairs = [pair for samples in replies.values() for pair in combinations(samples, 2)]
    if not pairs:
        return None
    same = sum(
        one["output_tokens"] // NOISE_BUCKET_TOKENS == two["output_tokens"] // NOISE_BUCKET_TOKENS for one, two in pairs
    )
    return {
        "bucket_tokens": NOISE_BUCKET_TOKENS,
        "num_prompts": sum(len(samples) > 1 for samples in replies.values()),
        "num_pairs": len(pairs),
        "num_pairs_with_a_reply_cut_off": sum(
            "length" in (one["finish_reason"], two["finish_reason"]) for one, two in pairs
        ),
        "share_in_one_bucket": round(same / len(pairs), 4),
    }


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
        prompts = choose_prompts(prepared, params.generate, params.seed)
    settings = fingerprint(params.target, params.generate, params.seed)
    report = generate(prompts, settings, params.generate, folder, None)
    reasons = report["finish_reasons"] or "none asked"
    progress(f"generate: {report['num_prompts']} prompts, {report['num_replies']} replies, finished by {reasons}")
    if noise := report["noise"]:
        progress(
            f"generate: {100 * noise['share_in_one_bucket']:.1f} % of {noise['num_pairs']} pairs of replies to one "
            f"prompt are in the same {noise['bucket_tokens']}-token bucket"
        )
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
