"""What an installed package must carry besides Python files."""

from __future__ import annotations

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {
    "jaxstate": "jaxstate",
    "jaxstate.models": "models",
    "jaxstate.models.families": "models/families",
    "jaxstate.kernels_pallas": "kernels_pallas",
    "jaxstate.serving": "serving",
}


def test_every_file_of_a_package_is_installed_with_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == FOLDERS
    named = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / FOLDERS[package]).glob(pattern)
        if path.is_file()
    }
    files = {
        path
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert files == named
    python = {path.parent for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")}
    assert python == {ROOT / folder for folder in FOLDERS.values()}
