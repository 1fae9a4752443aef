"""What a reader sees of a profile: tables for the console, and the curves of figure 2. matplotlib only on use."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from serving_plugin.core.errors import ConfigurationError
from serving_plugin.engine.profile import Fit, Profile

SUFFIXES = (".png", ".svg")
QUIET_SPREAD = 0.25  # repetitions on a quiet machine are closer together; measured beside other work, about 0.5
_COLOURS = ("#0d9488", "#d97706", "#8b5cf6", "#2563eb", "#db2777")
_LATENCY = "#64748b"


def tables(profile: Profile) -> Iterator[Table]:
    """Prefill by tokens, decode by batch (rows) and context (columns)."""
    table = Table(title="Prefill, one prompt a step", header_style="bold")
    for column in ("tokens", "step, ms", "tokens/s", "of the plateau"):
        table.add_column(column, justify="right")
    for size, step_ms in profile.prefill_ms.items():
        rate = 1000.0 * size / step_ms
        marked = "[bold green]{}[/bold green]" if size == profile.saturation_tokens else "{}"
        cells = (str(size), f"{step_ms:.1f}", f"{rate:.0f}", f"{rate / profile.plateau_tokens_per_s:.0%}")
        table.add_row(*(marked.format(cell) for cell in cells))
    yield table
    contexts = sorted({context for _, context in profile.decode_ms})
    table = Table(title="Decode step, ms (tokens/s), by prompt length", header_style="bold")
    for column in ("batch", *(f"{context} tokens" for context in contexts)):
        table.add_column(column, justify="right")
    for batch in sorted({batch for batch, _ in profile.decode_ms}):
        found = [profile.decode_ms.get((batch, context)) for context in contexts]
        table.add_row(str(batch), *("" if ms is None else f"{ms:.1f} ({1000 * batch / ms:.0f})" for ms in found))
    yield table


def sentences(profile: Profile) -> list[str]:
    """The chunk to use and the cost model, a line each."""
    lines = [
        f"prefill saturates at {profile.saturation_tokens} tokens, 95 % of {profile.plateau_tokens_per_s:.0f} "
        f"tokens/s: use --chunk-tokens {profile.chunk_tokens} with `tetri serve` and `tetri instance`"
    ]
    if not profile.has_levelled_off:
        longest = max(profile.prefill_ms)
        lines.append(f"throughput had not levelled off by {longest} tokens: measure longer prompts with --max-tokens")
    if profile.spread > QUIET_SPREAD:
        lines.append(
            f"repetitions differ by {profile.spread:.0%}: other work ran on this machine, measure again without"
        )
    (a, b, c), (d, e, f) = profile.prefill_fit.coefficients, profile.decode_fit.coefficients
    lines.append(f"prefill ms = {a:.4g} + {b:.4g}·tokens + {c:.4g}·tokens²; {_errors(profile.prefill_fit)}")
    lines.append(f"decode ms = {d:.4g} + {e:.4g}·context tokens + {f:.4g}·batch; {_errors(profile.decode_fit)}")
    return lines


def _errors(fit: Fit) -> str:
    return f"off by {fit.median_error:.1%} (median), {fit.max_error:.1%} (at most)"


def require_drawable(path: Path | None) -> None:
    """Refuse a picture format that is not drawn here, before minutes of measurement are lost on it."""
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"--plot {path}: must end in {' or '.join(SUFFIXES)}")


def picture(profile: Profile, suffix: str, title: str) -> bytes:
    """Two panels: prefill by tokens with its saturation point, decode by batch for each context.

    `suffix` is one of `SUFFIXES`.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "tetri"}):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _draw_prefill(left, profile)
        _draw_decode(right, profile)
        figure.suptitle(title)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix.lower()[1:], dpi=110)
    return buffer.getvalue()


def _draw_prefill(axes: Any, profile: Profile) -> None:
    sizes = list(profile.prefill_ms)
    rates = [1000.0 * size / step_ms for size, step_ms in profile.prefill_ms.items()]
    latency = axes.twinx()
    lines = axes.plot(sizes, rates, color=_COLOURS[0], marker="o", markersize=4, label="throughput (left)")
    lines += latency.plot(
        sizes, list(profile.prefill_ms.values()), color=_LATENCY, linestyle="--", label="step time (right)"
    )
    a, b, c = profile.prefill_fit.coefficients
    fitted = [a + b * size + c * size * size for size in sizes]
    lines += latency.plot(sizes, fitted, color=_LATENCY, linestyle=":", linewidth=1, label="cost model (right)")
    at = profile.saturation_tokens
    lines.append(axes.axvline(at, color=_COLOURS[1], linewidth=1.2, label=f"saturation: {at} tokens"))
    axes.set_title("Prefill, one prompt a step")
    _doubling(axes, sizes, "prompt tokens in the step")
    _finish(axes, latency, lines)


def _draw_decode(axes: Any, profile: Profile) -> None:
    latency, lines = axes.twinx(), []
    for number, context in enumerate(sorted({context for _, context in profile.decode_ms})):
        points = [(batch, ms) for (batch, of), ms in sorted(profile.decode_ms.items()) if of == context]
        batches, step_ms = [batch for batch, _ in points], [ms for _, ms in points]
        rates = [1000.0 * batch / ms for batch, ms in points]
        colour = _COLOURS[number % len(_COLOURS)]
        lines += axes.plot(batches, rates, color=colour, marker="o", markersize=4, label=f"{context}-token prompts")
        latency.plot(batches, step_ms, color=colour, linestyle="--", linewidth=1)
    lines += axes.plot([], [], color=_LATENCY, marker="o", markersize=4, label="solid: throughput (left)")
    lines += axes.plot([], [], color=_LATENCY, linestyle="--", label="dashed: step time (right)")
    axes.set_title("Decode")
    _doubling(axes, sorted({batch for batch, _ in profile.decode_ms}), "requests in the batch")
    _finish(axes, latency, lines)


def _doubling(axes: Any, values: list[int], label: str) -> None:
    """A logarithmic axis, with powers of two as labels."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([value for value in values if value & (value - 1) == 0])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_xlabel(label)


def _finish(axes: Any, latency: Any, lines: list[Any]) -> None:
    """Both vertical axes from 0, with room above the curves for the legend."""
    for one, label in ((axes, "throughput, tokens/s"), (latency, "step time, ms")):
        one.set_ylabel(label)
        one.set_ylim(0, 1.45 * one.get_ylim()[1])
    axes.legend(handles=lines, loc="upper left", ncols=2, frameon=False, fontsize=8)
    axes.grid(True, color="#d1d5da", linewidth=0.6)
