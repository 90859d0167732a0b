"""Arrows never point back: who imports whom, where programs are compiled, what imports touch."""

from __future__ import annotations

import ast
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = {
    "jaxstate": "jaxstate",
    "models": "jaxstate.models",
    "kernels_pallas": "jaxstate.kernels_pallas",
    "serving": "jaxstate.serving",
}
COMPILE_BOUNDARY = {"jaxstate/executor.py", "jaxstate/functional.py"}


def _files(*folders: str) -> list[pathlib.Path]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "site-packages" not in path.parts)


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def _module(path: pathlib.Path) -> str:
    """Dotted name of a file of one of the four folders."""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [PACKAGES[folder], *(part for part in rest if part != "__init__")]
    return ".".join(parts)


def _imports(path: pathlib.Path, source: str | None = None) -> Iterator[str]:
    """Full names of all a file imports, wherever in it; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source if source is not None else path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = _module(path).split(".")
                if path.name != "__init__.py":
                    above.pop()
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _offences(folder: str, forbidden) -> list[str]:
    return [
        f"{_name(path)} imports {name}"
        for path in _files(folder)
        for name in _imports(path)
        if forbidden(name)
    ]


def test_models_know_nothing_of_the_engine_the_kernels_or_the_service():
    assert not _offences(
        "models",
        lambda name: _within(name, "jaxstate") and not _within(name, "jaxstate.models"),
    )


def test_kernels_know_nothing_of_the_engine_the_models_or_the_service():
    assert not _offences(
        "kernels_pallas",
        lambda name: _within(name, "jaxstate") and not _within(name, "jaxstate.kernels_pallas"),
    )


def test_core_knows_nothing_of_the_service_of_grpc_or_of_threads():
    foreign = ("jaxstate.serving", "grpc", "threading", "queue", "concurrent", "asyncio", "_thread")
    assert not _offences("jaxstate", lambda name: any(_within(name, other) for other in foreign))


def test_top_folders_are_imported_by_their_full_names_only():
    bare = [folder for folder in PACKAGES if folder != "jaxstate"]
    offences = [
        f"{_name(path)} imports {name}"
        for path in _files(*PACKAGES, "tests", "bench")
        for name in _imports(path)
        if any(_within(name, folder) for folder in bare)
    ]
    assert not offences


def test_programs_are_compiled_at_the_boundary_only():
    offences = []
    for path in _files(*PACKAGES):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        by_attribute = any(
            isinstance(node, ast.Attribute)
            and node.attr in ("jit", "pmap")
            and isinstance(node.value, ast.Name)
            and node.value.id == "jax"
            for node in nodes
        )
        by_name = {"jax.jit", "jax.pmap"} & set(_imports(path))
        if (by_attribute or by_name) and _name(path) not in COMPILE_BOUNDARY:
            offences.append(_name(path))
    assert not offences
    assert all((ROOT / name).exists() for name in COMPILE_BOUNDARY)


@pytest.mark.parametrize(
    "source, wanted",
    [
        ("import jaxstate.serving.cli", ["jaxstate.serving.cli"]),
        ("from jaxstate import serving", ["jaxstate.serving"]),
        ("def f():\n    from jaxstate.pages import Entry, Pages", ["jaxstate.pages.Entry"]),
        ("from . import rope", ["jaxstate.kernels_pallas.rope"]),
        ("from ..engine import Engine", ["jaxstate.engine.Engine"]),
        ("from .. import engine", ["jaxstate.engine"]),
        ("if True:\n    import models", ["models"]),
    ],
)
def test_every_form_of_import_is_seen(source, wanted):
    found = list(_imports(ROOT / "kernels_pallas" / "rope.py", source))
    assert set(wanted) <= set(found)


def _import_in_new_process(modules: list[str], then: str = "") -> subprocess.CompletedProcess:
    """Import where any use of a device fails."""
    program = f"import importlib\nfor name in {modules}:\n    importlib.import_module(name)\n{then}"
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT / "tests",
        env=os.environ | {"JAX_PLATFORMS": "bogus"},
    )


def test_imports_touch_no_device():
    modules = sorted({_module(path) for path in _files(*PACKAGES)} - {"jaxstate.serving.__main__"})
    done = _import_in_new_process(modules)
    assert done.returncode == 0, done.stderr
    control = _import_in_new_process(["jax"], "importlib.import_module('jax').devices()")
    assert "bogus" in control.stderr


def test_importing_the_engine_does_not_load_the_service():
    done = _import_in_new_process(
        ["jaxstate", "jaxstate.engine", "jaxstate.functional"],
        "import sys\nprint([n for n in sys.modules if n.startswith(('jaxstate.serving', 'grpc'))])",
    )
    assert done.stdout.strip() == "[]", done.stderr
