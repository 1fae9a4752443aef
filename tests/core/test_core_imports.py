"""`core` stands on the standard library alone: what decides must start anywhere, and see no clock of its own."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import serving_plugin.core

FOLDER = Path(serving_plugin.core.__path__[0])
MODULES = sorted(module.name for module in pkgutil.iter_modules([str(FOLDER)]))


def test_importing_core_in_a_fresh_process_brings_no_heavy_package():
    names = [f"serving_plugin.core.{name}" for name in MODULES]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*sorted({'vllm', 'torch', 'numpy', 'transformers', 'mlflow', 'zmq', 'aiohttp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", MODULES)
def test_core_imports_only_the_standard_library_and_itself(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            imported.add(str(node.module))
    foreign = {m for m in imported if m.split(".")[0] not in sys.stdlib_module_names}
    assert all(m.startswith("serving_plugin.core.") for m in foreign), foreign
    assert not imported & {"asyncio", "time", "datetime", "threading"}


def test_there_are_modules_to_check():
    assert {"admit", "chunk", "dispatch", "order", "place", "registry"} <= set(MODULES)
