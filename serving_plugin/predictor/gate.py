"""Who may become champion: a pure rule over an evaluation report and a paired comparison with the champion in office.

The rule, at the granularity that the candidate is published at:

1. its accuracy beats naming the modal bucket and drawing on the marginal distribution for certain (the 95 % interval of
   the gain lies above zero), and it is not certainly worse than any other baseline;
2. with a champion of the same target, scored on the same rows: it is not certainly worse in accuracy or CRPS, and
   better in at least one of the two by its point value. A champion of another target or split stays in office, since
   nobody can tell; one that cannot be loaded does not.

Must not import MLflow, onnxruntime or a metrics library: numpy only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.predictor.evaluation.bootstrap import Array, Interval, paired_gain

MUST_BEAT = ("modal", "marginal")
NUM_RESAMPLES = 1000
SEED = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """May this version be champion, and one line per rule that it failed or that did not apply.

    `is_worse`: it failed a rule, so that promoting it takes force. A version that is neither champion nor worse was not
    compared, or was rolled back: a person decides.
    """

    is_champion: bool
    reasons: tuple[str, ...] = ()
    is_worse: bool = False

    def to_json(self, **more: Any) -> str:
        """What a version's tag `verdict` holds; `more` rides along and is not read back."""
        content = {"is_champion": self.is_champion, "is_worse": self.is_worse, "reasons": list(self.reasons)}
        return json.dumps({**content, **more}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Verdict | None:
        """Inverse of `to_json`; None when the text is not ours."""
        try:
            content = json.loads(text)
            is_champion = bool(content["is_champion"])
            # tags of earlier versions know only champions and worse ones
            is_worse = bool(content.get("is_worse", not is_champion))
            return cls(is_champion, tuple(str(reason) for reason in content["reasons"]), is_worse)
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class RowScores:
    """One predictor on the test split, row by row.

    `ids` (not unique: samples of one reply share it) and `roots`: (rows,) text. `lengths_tokens`: (rows,) true lengths.
    `hits`: (rows,) bool, the published bucket is the true one. `crps_tokens`: (rows,).
    """

    ids: tuple[str, ...]
    roots: tuple[str, ...]
    lengths_tokens: Array
    hits: Array
    crps_tokens: Array


@dataclass(frozen=True, slots=True)
class ChampionComparison:
    """Candidate minus champion on the same rows. Accuracy: above zero is better; CRPS in tokens: below zero is."""

    version: str
    num_rows: int
    accuracy_gain: Interval
    crps_difference_tokens: Interval

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": self.version,
            "num_rows": self.num_rows,
            "accuracy_gain": self.accuracy_gain.to_plain(),
            "crps_difference_tokens": self.crps_difference_tokens.to_plain(),
        }


@dataclass(frozen=True, slots=True)
class NotCompared:
    """A champion that says nothing about this candidate: of another target or split, or not loadable.

    `holds_office`: it serves all the same, so that only a person may replace it (`tetri models promote`).
    """

    version: str
    reason: str
    holds_office: bool = False

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"version": self.version, "not_compared": self.reason}


def baseline_gains(report: Mapping[str, Any], granularity_tokens: int) -> dict[str, Interval]:
    """Accuracy of the candidate minus each baseline's, from an evaluation report.

    Args:
        report: has `baselines`: name -> {"gain": {"accuracy_<granularity>": {"value", "low", "high"}}}.

    Raises:
        ConfigurationError: the report lacks them, or a baseline that has to be beaten.
    """
    key = f"accuracy_{granularity_tokens}"
    try:
        baselines = dict(report["baselines"])
        gains = {name: _interval(baseline["gain"][key]) for name, baseline in baselines.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"the evaluation has no baselines with a gain at {granularity_tokens} tokens ({error}); "
            "run `dvc repro evaluate`"
        ) from None
    missing = [name for name in MUST_BEAT if name not in gains]
    if missing:
        raise ConfigurationError(f"the evaluation lacks baseline {', '.join(missing)}; run `dvc repro evaluate`")
    return gains


def decide(
    candidate: Mapping[str, Any],
    granularity_tokens: int,
    champion: ChampionComparison | NotCompared | None = None,
    *,
    allow_worse: bool = False,
) -> Verdict:
    """Champion or challenger.

    Args:
        candidate: its evaluation report: `accuracy_<granularity>` and `baselines` (see `baseline_gains`).
        champion: the comparison with the one in office; None when there is none.
        allow_worse: champion whatever the rule says; the reasons then say so first.

    Raises:
        ConfigurationError: the report lacks the accuracy or the baselines.
    """
    accuracy = accuracy_of(candidate, granularity_tokens)
    failures = _against_baselines(accuracy, granularity_tokens, baseline_gains(candidate, granularity_tokens))
    notes: list[str] = []
    is_undecided = False
    if isinstance(champion, NotCompared):
        notes.append(f"not compared with champion version {champion.version}: {champion.reason}")
        is_undecided = champion.holds_office
    elif champion is not None:
        failures += _against_champion(granularity_tokens, champion)
    reasons, is_worse = (*failures, *notes), bool(failures)
    if allow_worse and (is_worse or is_undecided):
        return Verdict(True, ("champion only because of register.allow_worse", *reasons), is_worse)
    return Verdict(not (is_worse or is_undecided), reasons, is_worse)


def accuracy_of(report: Mapping[str, Any], granularity_tokens: int) -> float:
    """The candidate's accuracy (share of rows) at this granularity.

    Raises:
        ConfigurationError: the report does not have it.
    """
    key = f"accuracy_{granularity_tokens}"
    try:
        return float(report[key])
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError(f"the evaluation has no {key}; run `dvc repro evaluate`") from None


def compare(version: str, candidate: RowScores, champion: RowScores) -> ChampionComparison:
    """Paired comparison by conversation with the champion of that version.

    Raises:
        ValueError: the two were not scored on the same rows in the same order.
    """
    if candidate.ids != champion.ids:
        raise ValueError("a paired comparison needs the same rows in the same order")
    gains = [
        paired_gain(a, b, candidate.roots, NUM_RESAMPLES, SEED)
        for a, b in ((candidate.hits, champion.hits), (candidate.crps_tokens, champion.crps_tokens))
    ]
    return ChampionComparison(version, len(candidate.ids), *gains)


def _interval(content: Mapping[str, Any]) -> Interval:
    low, high = (math.nan if content.get(name) is None else float(content[name]) for name in ("low", "high"))
    return Interval(float(content["value"]), low, high)


def _against_baselines(accuracy: float, granularity_tokens: int, gains: Mapping[str, Interval]) -> list[str]:
    at = f"accuracy {accuracy:.3f} at {granularity_tokens} tokens"
    failures = []
    for name, gain in gains.items():
        other = f"baseline {name} ({accuracy - gain.value:.3f}): gain {_shown(gain)}"
        if name in MUST_BEAT and not gain.low > 0:  # so that NaN fails
            failures.append(f"{at} does not beat {other} is not above zero")
        elif gain.high < 0:
            failures.append(f"{at} is worse than {other} is below zero")
    return failures


def _against_champion(granularity_tokens: int, comparison: ChampionComparison) -> list[str]:
    gain, crps = comparison.accuracy_gain, comparison.crps_difference_tokens
    champion = f"champion version {comparison.version} on the same {comparison.num_rows} rows"
    failures = []
    if gain.high < 0:
        failures.append(f"accuracy at {granularity_tokens} tokens is worse than {champion}: gain {_shown(gain)}")
    if crps.low > 0:
        failures.append(f"CRPS is worse than {champion}: {_shown(crps, digits=1)} tokens")
    if not failures and not (gain.value > 0 or crps.value < 0):
        failures.append(
            f"no better than {champion}: accuracy at {granularity_tokens} tokens {gain.value:+.3f}, "
            f"CRPS {crps.value:+.1f} tokens"
        )
    return failures


def _shown(interval: Interval, digits: int = 3) -> str:
    if math.isnan(interval.low):
        return f"{interval.value:+.{digits}f} without an interval (evaluate.num_bootstrap is 0?)"
    return f"{interval.value:+.{digits}f} [{interval.low:+.{digits}f}, {interval.high:+.{digits}f}]"
