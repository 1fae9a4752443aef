"""Workloads: which prompts arrive when, and how many tokens each shall put out. Deterministic by seed.

Prompts are real ShareGPT text. Lengths come from the same rows (`sharegpt`: the prompt's and the recorded reply's
tokens, counted by the target's tokenizer) or from the paper's figure 1 (`paper`: log-normal around its medians).
Source: TetriInfer 5.1 for LPLD, LPHD, HPLD, HPHD, Mixed; docs/definitions.md "Metrics" for what they mean here.
Imports neither vllm nor torch.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Protocol

from serving_plugin.bench.sharegpt import PACKAGE_SOURCE, FirstPair, first_pairs, read_conversations
from serving_plugin.core.errors import ConfigurationError
from serving_plugin.core.forecast import HEAVY_DECODE_OVER_TOKENS, HEAVY_PREFILL_OVER_TOKENS

# Contexts at which the thresholds count in full. ShareGPT: OPT-13B's own 2,048 positions. Paper lengths: twice that,
# since a summarisation prompt of 2,000 tokens and a creation reply of 1,000 must both fit with their tails.
FULL_CONTEXT_TOKENS = {"sharegpt": 2048, "paper": 4096}
MIN_OUTPUT_TOKENS = 2  # one token has no gap: neither ITL nor TPOT
_MAX_CHARS_PER_TOKEN = 24  # a prompt with more characters per allowed token is skipped without counting its tokens
_MAX_DRAWS = 10_000


class WorkloadName(StrEnum):
    """The paper's five workloads."""

    LPLD = "lpld"
    LPHD = "lphd"
    HPLD = "hpld"
    HPHD = "hphd"
    MIXED = "mixed"


class LengthSource(StrEnum):
    """Where lengths come from."""

    SHAREGPT = "sharegpt"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Length distribution by its median; `sigma` is the standard deviation of log(length)."""

    median_tokens: float
    sigma: float

    def draw(self, rng: random.Random, scale: float) -> int:
        """One length in tokens, at least 1."""
        return max(1, round(math.exp(rng.gauss(math.log(self.median_tokens * scale), self.sigma))))


@dataclass(frozen=True, slots=True)
class Task:
    """Prompt and output lengths of one downstream task."""

    prompt: LogNormal
    output: LogNormal


# Medians: figure 1 ("over 2000", "under 100", "over 1000" taken at the bound; creation's prompt, "short to moderate",
# is our reading). The spreads are ours: the paper prints curves without numbers.
PAPER_TASKS = {
    "chat": Task(LogNormal(18, 1.0), LogNormal(128, 0.8)),
    "summarisation": Task(LogNormal(2000, 0.4), LogNormal(100, 0.6)),
    "creation": Task(LogNormal(64, 0.9), LogNormal(1000, 0.4)),
}
_TASKS_OF_WORKLOAD = {
    WorkloadName.LPLD: ((PAPER_TASKS["chat"].prompt, PAPER_TASKS["chat"].output),),
    WorkloadName.LPHD: ((PAPER_TASKS["creation"].prompt, PAPER_TASKS["creation"].output),),
    WorkloadName.HPLD: ((PAPER_TASKS["summarisation"].prompt, PAPER_TASKS["summarisation"].output),),
    WorkloadName.HPHD: ((PAPER_TASKS["summarisation"].prompt, PAPER_TASKS["creation"].output),),
    WorkloadName.MIXED: tuple((task.prompt, task.output) for task in PAPER_TASKS.values()),
}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request to send: `arrival_s` after the start of the run, exactly `num_output_tokens` to be put out."""

    id: str
    prompt: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float
    workload_class: str


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """What to draw. `rate_per_s` None means that all requests arrive at once; `scale` None follows the context.

    `max_output_tokens` cuts recorded replies (the work of a run must be bounded); `max_prompt_tokens` None means what
    the context leaves beside the longest output.
    """

    name: WorkloadName
    num_requests: int
    seed: int
    max_model_len_tokens: int
    rate_per_s: float | None = None
    length_source: LengthSource = LengthSource.SHAREGPT
    max_output_tokens: int = 256
    max_prompt_tokens: int | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigurationError(f"--num-requests {self.num_requests} is below 1")
        if self.rate_per_s is not None and not (self.rate_per_s > 0 and math.isfinite(self.rate_per_s)):
            raise ConfigurationError(f"--rate {self.rate_per_s} is not above 0; leave it out to send all at once")
        if self.max_output_tokens < MIN_OUTPUT_TOKENS:
            raise ConfigurationError(f"--max-output-tokens {self.max_output_tokens} is below {MIN_OUTPUT_TOKENS}")
        if self.scale is not None and not 0 < self.scale <= 1:
            raise ConfigurationError(f"--scale {self.scale} is outside (0, 1]")
        if self.prompt_limit_tokens < 1:
            raise ConfigurationError(
                f"--max-output-tokens {self.max_output_tokens} leaves no room for a prompt in a context of "
                f"{self.max_model_len_tokens} tokens; lower it"
            )
        self._require_heavy_room()

    def _require_heavy_room(self) -> None:
        if self.wants_heavy_prefill and self.prompt_limit_tokens <= self.heavy_prefill_over_tokens:
            raise ConfigurationError(
                f"workload {self.name} needs prompts over {self.heavy_prefill_over_tokens} tokens, but the limit is "
                f"{self.prompt_limit_tokens}; raise --max-prompt-tokens or lower --scale"
            )
        if self.wants_heavy_decode and self.max_output_tokens <= self.heavy_decode_over_tokens:
            raise ConfigurationError(
                f"workload {self.name} needs outputs over {self.heavy_decode_over_tokens} tokens, but "
                f"--max-output-tokens is {self.max_output_tokens}; raise it or lower --scale"
            )

    @property
    def wants_heavy_prefill(self) -> bool:
        """Whether every prompt must be heavy."""
        return self.name in (WorkloadName.HPLD, WorkloadName.HPHD)

    @property
    def wants_heavy_decode(self) -> bool:
        """Whether every output must be heavy."""
        return self.name in (WorkloadName.LPHD, WorkloadName.HPHD)

    @property
    def effective_scale(self) -> float:
        """Factor on both thresholds (and on the paper's lengths), below 1 when the context is short."""
        if self.scale is not None:
            return self.scale
        return min(1.0, self.max_model_len_tokens / FULL_CONTEXT_TOKENS[self.length_source])

    @property
    def prompt_limit_tokens(self) -> int:
        """Longest prompt that may be drawn."""
        room = self.max_model_len_tokens - self.max_output_tokens
        return room if self.max_prompt_tokens is None else min(room, self.max_prompt_tokens)

    @property
    def heavy_prefill_over_tokens(self) -> int:
        """Prompts above this are heavy."""
        return max(1, round(HEAVY_PREFILL_OVER_TOKENS * self.effective_scale))

    @property
    def heavy_decode_over_tokens(self) -> int:
        """Outputs above this are heavy."""
        return max(MIN_OUTPUT_TOKENS, round(HEAVY_DECODE_OVER_TOKENS * self.effective_scale))

    def classify(self, num_prompt_tokens: int, num_output_tokens: int) -> str:
        """`lpld`, `lphd`, `hpld` or `hphd`."""
        prefill = "hp" if num_prompt_tokens > self.heavy_prefill_over_tokens else "lp"
        return prefill + ("hd" if num_output_tokens > self.heavy_decode_over_tokens else "ld")

    def accepts(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        """Whether such a request belongs to this workload and fits its limits."""
        if not (1 <= num_prompt_tokens <= self.prompt_limit_tokens):
            return False
        if not MIN_OUTPUT_TOKENS <= num_output_tokens <= self.max_output_tokens:
            return False
        return self.name is WorkloadName.MIXED or self.classify(num_prompt_tokens, num_output_tokens) == self.name


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one run with the facts that a report must state."""

    spec: WorkloadSpec
    requests: tuple[BenchRequest, ...]
    source: str
    num_capped_outputs: int = field(default=0)

    def facts(self) -> dict[str, object]:
        """Scale, thresholds and length statistics, JSON-ready."""
        prompts = [r.num_prompt_tokens for r in self.requests]
        outputs = [r.num_output_tokens for r in self.requests]
        classes = [r.workload_class for r in self.requests]
        return {
            "name": self.spec.name.value,
            "source": self.source,
            "length_source": self.spec.length_source.value,
            "num_requests": len(self.requests),
            "seed": self.spec.seed,
            "rate_per_s": self.spec.rate_per_s,
            "scale": round(self.spec.effective_scale, 4),
            "heavy_prefill_over_tokens": self.spec.heavy_prefill_over_tokens,
            "heavy_decode_over_tokens": self.spec.heavy_decode_over_tokens,
            "max_output_tokens": self.spec.max_output_tokens,
            "num_capped_outputs": self.num_capped_outputs,
            "prompt_tokens": {"min": min(prompts), "median": median(prompts), "max": max(prompts), "sum": sum(prompts)},
            "output_tokens": {"min": min(outputs), "median": median(outputs), "max": max(outputs), "sum": sum(outputs)},
            "classes": {name: classes.count(name) for name in sorted(set(classes))},
        }


class Tokenizer(Protocol):
    """What is asked of the target's tokenizer."""

    def count_prompt(self, text: str) -> int:
        """Tokens of a prompt as the server counts it, special tokens included."""

    def count_reply(self, text: str) -> int:
        """Tokens of a reply, special tokens not included."""

    def cut(self, text: str, num_tokens: int) -> str:
        """Longest start of `text` of at most about `num_tokens` prompt tokens."""


class FastTokenizer:
    """`tokenizer.json` read by the tokenizers library."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def count_prompt(self, text: str) -> int:
        """Tokens of a prompt as the server counts it, special tokens included."""
        return len(self._tokenizer.encode(text).ids)

    def count_reply(self, text: str) -> int:
        """Tokens of a reply, special tokens not included."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def cut(self, text: str, num_tokens: int) -> str:
        """Start of `text` that ends with its `num_tokens`-th token."""
        num_special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets[: max(1, num_tokens - num_special)]
        return text[: offsets[-1][1]] if offsets else ""


class SlowTokenizer:
    """Any other tokenizer, through transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def count_prompt(self, text: str) -> int:
        """Tokens of a prompt as the server counts it, special tokens included."""
        return len(self._tokenizer(text)["input_ids"])

    def count_reply(self, text: str) -> int:
        """Tokens of a reply, special tokens not included."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def cut(self, text: str, num_tokens: int) -> str:
        """Start of `text` of about `num_tokens` tokens."""
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][:num_tokens]
        return str(self._tokenizer.decode(ids))


def load_tokenizer(model_folder: Path) -> Tokenizer:
    """The target's tokenizer. Raises `ConfigurationError` when the folder holds none."""
    if not model_folder.is_dir():
        raise ConfigurationError(f"model {model_folder} is not a folder; make it with `python -m pipeline.target`")
    fast = model_folder / "tokenizer.json"
    if fast.is_file():
        return FastTokenizer(fast)
    if not (model_folder / "tokenizer_config.json").is_file():
        raise ConfigurationError(f"model {model_folder} has no tokenizer.json and no tokenizer_config.json")
    return SlowTokenizer(model_folder)


def model_context_tokens(model_folder: Path) -> int:
    """`max_position_embeddings` of the model's config.json. Raises `ConfigurationError` when it is not there."""
    path = model_folder / "config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))["max_position_embeddings"]
    except FileNotFoundError:
        raise ConfigurationError(f"model {model_folder} has no config.json; give a model folder with --model") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f"{path} names no max_position_embeddings; give --max-model-len") from None
    return int(value)


def read_pairs(source: str) -> list[FirstPair]:
    """First questions and replies of `source`, in file order.

    Args:
        source: `sharegpt` (the package), a ShareGPT file or URL, or prepared JSON lines with `prompt` and `reply`: the
            test split of the pipeline, whose prompts the length predictor has not seen.

    Raises:
        ConfigurationError: the source is missing or holds no pair.
    """
    located = PACKAGE_SOURCE if source == "sharegpt" else source
    prepared = _read_prepared(Path(source)) if source.endswith(".jsonl") else None
    pairs = list(first_pairs(read_conversations(located))) if prepared is None else prepared
    if not pairs:
        raise ConfigurationError(f"{source} holds no question with a reply; give a ShareGPT file with --source")
    return pairs


def _read_prepared(path: Path) -> list[FirstPair] | None:
    """Rows of the pipeline's prepared data; None when the file holds conversations instead."""
    if not path.is_file():
        return None  # the ShareGPT reader names the cure
    pairs = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                raise ConfigurationError(f"{path} line {number} is not JSON; repair or replace the file") from None
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                return None
            reply = row.get("reply", row.get("response"))
            if not isinstance(reply, str):
                raise ConfigurationError(f"{path} line {number} has no reply; lengths need one")
            row_id = str(row.get("id", number))
            pairs.append(FirstPair(row_id, str(row.get("root_id", row_id)), row["prompt"], reply))
    return pairs


def parse_workload_name(text: str) -> WorkloadName:
    """The workload named `text` in any case; `ConfigurationError` lists the known ones."""
    try:
        return WorkloadName(text.strip().lower())
    except ValueError:
        raise ConfigurationError(
            f"unknown workload {text!r}; known are {', '.join(w.value for w in WorkloadName)}"
        ) from None


def make_workload(
    spec: WorkloadSpec,
    pairs: Sequence[FirstPair],
    tokenizer: Tokenizer,
    source: str,
    on_progress: Callable[[int], None] = lambda num_drawn: None,
) -> Workload:
    """Draw `spec.num_requests` requests. Same arguments, same workload.

    Raises:
        ConfigurationError: the data does not hold enough requests of the kind.
    """
    order = list(range(len(pairs)))
    random.Random(f"{spec.seed}:order").shuffle(order)
    shuffled = (pairs[i] for i in order)
    if spec.length_source is LengthSource.SHAREGPT:
        drawn = _draw_recorded(spec, shuffled, tokenizer)
    else:
        drawn = _draw_paper(spec, shuffled, tokenizer)
    arrivals = arrival_times_s(spec.num_requests, spec.rate_per_s, spec.seed)
    requests: list[BenchRequest] = []
    num_capped = 0
    for prompt, num_prompt, num_output, was_capped in drawn:
        index = len(requests)
        kind = spec.classify(num_prompt, num_output)
        requests.append(BenchRequest(f"{spec.name}-{index}", prompt, num_prompt, num_output, arrivals[index], kind))
        num_capped += was_capped
        on_progress(len(requests))
        if len(requests) == spec.num_requests:
            return Workload(spec, tuple(requests), source, num_capped)
    raise ConfigurationError(
        f"{source} holds only {len(requests)} of {spec.num_requests} requests for workload {spec.name} "
        f"(prompt limit {spec.prompt_limit_tokens} tokens); lower --num-requests or give more data with --source"
    )


def arrival_times_s(num_requests: int, rate_per_s: float | None, seed: int) -> list[float]:
    """Poisson arrivals from 0 on; all zero without a rate. The same for every workload of a seed."""
    if rate_per_s is None:
        return [0.0] * num_requests
    rng = random.Random(f"{seed}:arrivals")
    times_s = [0.0]
    while len(times_s) < num_requests:
        times_s.append(times_s[-1] + rng.expovariate(rate_per_s))
    return times_s


_Drawn = tuple[str, int, int, bool]


def _draw_recorded(spec: WorkloadSpec, pairs: Iterator[FirstPair], tokenizer: Tokenizer) -> Iterator[_Drawn]:
    max_chars = spec.prompt_limit_tokens * _MAX_CHARS_PER_TOKEN
    for pair in pairs:
        if len(pair.prompt) > max_chars:
            continue
        num_prompt = tokenizer.count_prompt(pair.prompt)
        num_recorded = tokenizer.count_reply(pair.reply)
        num_output = min(num_recorded, spec.max_output_tokens)
        if spec.accepts(num_prompt, num_output):
            yield pair.prompt, num_prompt, num_output, num_recorded > num_output


def _draw_paper(spec: WorkloadSpec, pairs: Iterator[FirstPair], tokenizer: Tokenizer) -> Iterator[_Drawn]:
    """Real text cut to lengths drawn from the paper's distributions, conditioned on class and limits.

    The task is drawn first and its lengths until they fit, so that the limits do not change the mix of tasks.
    """
    rng = random.Random(f"{spec.seed}:paper")
    texts = (pair.prompt for pair in pairs)
    while True:
        prompt_lengths, output_lengths = rng.choice(_TASKS_OF_WORKLOAD[spec.name])
        for _ in range(_MAX_DRAWS):
            num_wanted = prompt_lengths.draw(rng, spec.effective_scale)
            num_drawn = output_lengths.draw(rng, spec.effective_scale)
            num_output = min(num_drawn, spec.max_output_tokens)
            if spec.accepts(num_wanted, num_output):
                break
        else:
            raise ConfigurationError(
                f"the paper's lengths at scale {spec.effective_scale:g} do not fit --max-prompt-tokens "
                f"{spec.prompt_limit_tokens} and --max-output-tokens {spec.max_output_tokens}; lower --scale"
            )
        text = _text_of(num_wanted, texts, tokenizer)
        if text is None:
            return
        num_prompt = tokenizer.count_prompt(text)  # a cut text may be split into tokens in another way
        if spec.accepts(num_prompt, num_output):
            yield text, num_prompt, num_output, num_drawn > num_output


def _text_of(num_tokens: int, texts: Iterator[str], tokenizer: Tokenizer) -> str | None:
    """Real prompts joined until they reach `num_tokens`, then cut there; None when the data is used up."""
    joined = ""
    for text in texts:
        piece = text[: num_tokens * _MAX_CHARS_PER_TOKEN]
        joined = f"{joined}\n{piece}" if joined else piece
        if tokenizer.count_prompt(joined) >= num_tokens:
            return tokenizer.cut(joined, num_tokens)
    return None
