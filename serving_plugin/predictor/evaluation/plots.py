"""Pictures of an evaluation, as PNG for the pipeline and as inline SVG for the page. matplotlib is imported on use."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from serving_plugin.predictor.evaluation.scores import Array
from serving_plugin.predictor.evaluation.tables import CoveragePoint, ReliabilityBin

_INK, _GRID = "#010203", "#d1d5da"  # replaced in SVG, so that the page's light and dark colours apply
_OURS = "#0d9488"
_OTHERS = ("#d97706", "#8b5cf6", "#64748b", "#db2777", "#2563eb", "#65a30d", "#b45309", "#0891b2")

Draw = Callable[[Any], None]  # of matplotlib axes


def draw_reliability(bins: Sequence[ReliabilityBin], granularity_tokens: int) -> Draw:
    """How often the likeliest bucket came, against its probability; the dots' areas are numbers of rows."""

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=":")
        total = sum(one.num_rows for one in bins)
        sizes = [20 + 280 * one.num_rows / total for one in bins]
        x, y = [one.confidence for one in bins], [one.accuracy for one in bins]
        axes.plot(x, y, color=_OURS, linewidth=1.4)
        axes.scatter(x, y, s=sizes, color=_OURS, alpha=0.6)
        axes.set(
            xlabel="probability of the likeliest bucket", ylabel="how often it came", xlim=(0, 1), ylim=(0, 1),
            title=f"Reliability at {granularity_tokens} tokens",
        )  # fmt: skip

    return draw


def draw_coverage(points: Sequence[CoveragePoint]) -> Draw:
    """Share of rows at or below a quantile, against its level."""

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=":")
        axes.plot(
            [one.level for one in points], [one.coverage for one in points], color=_OURS, marker="o", markersize=4
        )
        axes.set(
            xlabel="level of the quantile", ylabel="share of replies at or below", xlim=(0, 1), ylim=(0, 1.01),
            title="Coverage",
        )  # fmt: skip

    return draw


def draw_cost_of_coverage(curves: Mapping[str, Sequence[CoveragePoint]]) -> Draw:
    """Over-reserved tokens against the coverage that they buy, a curve per model: lower is better at equal coverage."""

    def draw(axes: Any) -> None:
        for number, (name, points) in enumerate(curves.items()):
            axes.plot(
                [one.coverage for one in points],
                [one.over_reserved_tokens for one in points],
                color=_OURS if number == 0 else _OTHERS[(number - 1) % len(_OTHERS)],
                linewidth=2.0 if number == 0 else 1.2,
                linestyle="-" if number == 0 else "--",
                marker="o" if number == 0 else None,
                markersize=4,
                label=name,
            )
        axes.set(
            xlabel="share of replies covered", ylabel="over-reserved tokens per reply", xlim=(0, 1),
            title="Coverage against width",
        )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)

    return draw


def draw_lengths(lengths_tokens: Array, means_tokens: Array) -> Draw:
    """Actual against expected length, a dot per row."""

    def draw(axes: Any) -> None:
        longest = float(max(np.max(lengths_tokens), np.max(means_tokens), 1))
        axes.scatter(lengths_tokens, means_tokens, s=4, alpha=0.4, color=_OURS)
        axes.plot([0, longest], [0, longest], color=_INK, linewidth=0.8)
        axes.set(
            xlabel="actual output length, tokens", ylabel="expected output length, tokens",
            xlim=(0, longest), ylim=(0, longest),
        )  # fmt: skip

    return draw


def png(*panels: Draw) -> bytes:
    """The panels side by side."""
    return _render(panels, "png", "png", transparent=False)


def svg(name: str, label: str, *panels: Draw) -> str:
    """The same as inline SVG: the page's text colour, no metadata, ids of its own, `label` for screen readers."""
    text = _render(panels, "svg", name, transparent=True).decode("utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(|href=")#(?!\d)', rf"\1#{name}-", text)
    text = text.replace(_INK, "currentColor").replace(_GRID, "var(--line)")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _render(panels: Sequence[Draw], kind: str, salt: str, *, transparent: bool) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9, "font.family": "sans-serif",
        "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.8 * len(panels), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, draw in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
            draw(axes)
            axes.grid(True, color=_GRID, linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        # No date: the same evaluation gives the same picture.
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        figure.savefig(buffer, format=kind, dpi=120, transparent=transparent, metadata=metadata)
    return buffer.getvalue()
