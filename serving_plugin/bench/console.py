"""A benchmark on the console: progress on stderr (a live bar, in a log a line now and then), the table on stdout."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from serving_plugin.bench import loadgen
from serving_plugin.bench.compare import BenchResult, RunResult
from serving_plugin.bench.report import render_table, write_json
from serving_plugin.bench.report_html import write_html
from serving_plugin.core.errors import ConfigurationError

_LINE_INTERVAL_S = 10.0


class ConsoleWatcher:
    """`compare.Watcher` that prints. A context manager: the live bar needs an end."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._last_line_s = float("-inf")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """A new stage begins."""
        self._drop_task()
        self._console.print(f"[bold]{_escaped(text)}[/bold]")

    def starting(self, system: str, waiting: set[str], elapsed_s: float) -> None:
        """A system is not ready yet."""
        if not waiting:
            self._drop_task()
            self._console.print(f"  ready after {elapsed_s:.0f} s")
        else:
            self._show(f"starting {', '.join(sorted(waiting))}", 0, None, f"{elapsed_s:.0f} s")

    def load(self, title: str, progress: loadgen.Progress) -> None:
        """Requests were sent, or came back."""
        running = progress.num_sent - progress.num_done
        failed = f", {progress.num_failed} failed" if progress.num_failed else ""
        self._show(title, progress.num_done, progress.num_total, f"{running} running{failed}")

    def finished(self, result: RunResult) -> None:
        """One run is over: its main figures on one line."""
        self._drop_task()
        figures = result.metrics
        parts = [f"{figures.num_ok}/{figures.num_requests} ok"]
        if figures.ttft_s and figures.jct_s:
            parts += [f"TTFT {figures.ttft_s.mean:.2f} s", f"JCT {figures.jct_s.mean:.2f} s"]
        if figures.itl_s:
            parts.append(f"ITL p99 {1000 * figures.itl_s.p99:.0f} ms")
        self._console.print(f"  {result.system} · {result.workload} · seed {result.seed}: {', '.join(parts)}")

    def _show(self, title: str, done: int, total: int | None, note: str) -> None:
        if not self._console.is_terminal:
            now_s = time.monotonic()
            if now_s - self._last_line_s >= _LINE_INTERVAL_S:
                self._last_line_s = now_s
                count = f" {done}/{total}" if total is not None else ""
                self._console.print(f"  {_escaped(title)}{count} ({note})")
            return
        if self._task is None:
            self._task = self._bar.add_task(title, total=total, note=note)
        self._bar.update(self._task, description=title, completed=done, total=total, note=note)

    def _drop_task(self) -> None:
        self._last_line_s = float("-inf")
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def require_writable(*paths: Path | None) -> None:
    """Refuse an output path that cannot be written, before minutes of measurement are lost on it."""
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigurationError(f"{path} cannot be written; give the path of a file in a folder of yours")


def deliver(result: BenchResult, json_path: Path | None, report_path: Path | None) -> bool:
    """Write the files, print the table; whether every run finished at least one request."""
    notes = Console(stderr=True)
    if json_path is not None:
        write_json(result, json_path)
        notes.print(f"raw figures: {json_path}")
    if report_path is not None:
        write_html(result, report_path)
        notes.print(f"report: {report_path}")
    Console(width=None if sys.stdout.isatty() else 120).print(render_table(result))
    return all(run.metrics.num_ok > 0 for run in result.runs)
