"""The floors of the house: who may import whom, how long a file may be, and that the page starts without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
ROOMS = ("clef_core", "db", "worker", "web", "training")
SOURCES = [PROJECT / "app.py", *sorted(path for room in ROOMS for path in (PROJECT / room).rglob("*.py"))]

TORCH = {"torch", "torchvision", "transformers", "triton", "quark"}
TORCH_FREE_CORE = {
    f"clef_core.{name}"
    for name in (
        "errors", "strict_json", "rules", "schema", "images", "answers", "tokens", "release", "stats", "tasks",
        "comparison", "comparison_report", "comparison_build", "sensitivity_plot", "card", "windows",
    )
}  # fmt: skip
MODEL_PROCESS = ("worker.serve", "worker.jobs", "worker.commands.")
"""Modules of `worker` that run where a model is in memory, or load one inside a command."""

WORKER_FOR_WEB = {
    f"worker.{name}"
    for name in (
        "submit", "tables", "questions_file", "settings", "progress",
        "compare", "comparison_export", "comparison_summary", "comparison_tables", "sides", "together",
    )
}  # fmt: skip


def module_name(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, inside functions too; `from a import b` gives a.b where b is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                inner = PROJECT / node.module.replace(".", "/") / alias.name
                is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                yield node.lineno, f"{node.module}.{alias.name}" if is_module else node.module


def is_allowed(importer: str, imported: str) -> bool:
    room, target = importer.split(".")[0], imported.split(".")[0]
    is_model_code = target in TORCH or (target == "clef_core" and imported not in TORCH_FREE_CORE)
    if is_model_code:
        return importer.startswith((*MODEL_PROCESS, "training")) or (
            room == "clef_core" and importer not in TORCH_FREE_CORE
        )
    if target not in (*ROOMS, "app") or target == room:
        return True
    match room:
        case "worker":
            return target in ("db", "clef_core")
        case "web":
            return target in ("db", "clef_core") or imported in WORKER_FOR_WEB
        case "training":
            return target == "clef_core"
        case "app":
            return target in ("web", "worker", "db", "clef_core")
    return False


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_a_module_imports_only_what_its_floor_allows(path: Path) -> None:
    importer = module_name(path)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    forbidden = [f"line {line}: {name}" for line, name in imported_modules(tree) if not is_allowed(importer, name)]
    assert not forbidden, f"{importer} must not import {forbidden}"


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("clef_core.schema", "db.store"),
        ("clef_core.tokens", "clef_core.encoding"),
        ("db.store", "clef_core.schema"),
        ("worker.submit", "torch"),
        ("worker.tables", "clef_core.engine"),
        ("worker.submit", "web.api"),
        ("web.api", "transformers"),
        ("web.api", "worker.serve"),
        ("web.page", "clef_core.engine"),
        ("web.page", "clef_core"),
        ("app", "clef_core.model"),
        ("training.train", "worker.settings"),
        ("clef_core.engine", "training.train"),
    ],
)
def test_the_floors_refuse_what_they_are_there_to_refuse(importer: str, imported: str) -> None:
    assert not is_allowed(importer, imported)


@pytest.mark.parametrize(
    "modules",
    ["app", "web.server", "worker.supervise", ", ".join(sorted(TORCH_FREE_CORE))],
    ids=["app", "web", "supervisor", "core"],
)
def test_importing_it_loads_no_torch(modules: str) -> None:
    code = f"import {modules}, sys; print(sorted({TORCH!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr


def test_no_source_file_is_longer_than_500_lines() -> None:
    ours = [*SOURCES, *(PROJECT / "tests").rglob("*.py"), *(PROJECT / "scripts").rglob("*.py")]
    lengths = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ours}
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_no_module_is_a_bag() -> None:
    bags = {"util", "utils", "helper", "helpers", "common", "misc"}
    assert [module_name(path) for path in SOURCES if path.stem in bags] == []
