"""What every result of the smaller benchmarks holds besides its figures, and how it is delivered."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serving_plugin.bench.compare import machine_facts, version_facts
from serving_plugin.bench.report import write_atomically

if TYPE_CHECKING:
    from serving_plugin.predictor.model import LengthPredictor

_WIDTH = 140


def _command() -> str:
    return " ".join(["python -m benchmarks", *sys.argv[1:]])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def code_digest() -> str:
    """Digest of the Python sources that a result came from: `serving_plugin` and `benchmarks`, names and contents."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for part in ("serving_plugin", "benchmarks") for path in (root / part).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(slots=True, kw_only=True)
class Record:
    """How figures came about; a benchmark's own class adds the figures and shows them."""

    command: str = field(default_factory=_command)
    started: str = field(default_factory=_now)
    machine: dict[str, Any] = field(default_factory=machine_facts)
    versions: dict[str, str] = field(default_factory=version_facts)
    code: str = field(default_factory=code_digest)

    def tables(self) -> Iterator[Table]:
        """What the console and the page show."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether every part brought figures."""
        raise NotImplementedError


def deliver(record: Record, json_path: Path | None, report_path: Path | None) -> bool:
    """Write the files, print the tables; whether every part brought figures."""
    if json_path is not None:
        write_atomically(json_path, json.dumps(asdict(record), indent=2) + "\n")
        say(f"raw figures: {json_path}")
    if report_path is not None:
        page = Console(file=StringIO(), record=True, width=_WIDTH)
        for table in record.tables():
            page.print(table)
        page.print(f"{record.command}, {record.started}, {record.machine}, {record.versions}", markup=False)
        write_atomically(report_path, page.export_html(inline_styles=True))
        say(f"report: {report_path}")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in record.tables():
        console.print(table)
    return record.is_complete


def save_figure(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a matplotlib figure whole or not at all, as the path's suffix says."""
    buffer = BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=dpi)
    write_atomically(path, buffer.getvalue())


def describe(predictor: LengthPredictor) -> str:
    """One line: which version, trained on how many replies, and how it runs."""
    found, spec = predictor.resolved, predictor.spec
    return (
        f"{found.name} version {found.version}: {sum(spec.train_counts)} training replies, "
        f"{spec.input.max_tokens} tokens of input, {'8-bit' if predictor.is_quantised else 'float32'}; {spec.split}"
    )


def say(message: str) -> None:
    """One line of progress."""
    print(message, file=sys.stderr, flush=True)
