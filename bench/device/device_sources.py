"""Make this checkout's jaxstate importable where it, or what it needs for text, is not installed.

The package's own `__init__` files import engines, tokenizers and loaders, which need packages that
a machine for measurements rarely has. Kernels, the step and a service without text need jax, numpy
and flax.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """Put a folder of links first on sys.path, unless `import jaxstate` gives this checkout."""
    if _installed():
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxstate"]:
        del sys.modules[name]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxstate-links-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _link(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def _installed() -> bool:
    """Whether the whole package is there, and is this checkout's."""
    try:
        package = importlib.import_module("jaxstate")
    except ImportError:
        return False
    return pathlib.Path(str(package.__file__)).resolve() == ROOT / "jaxstate" / "__init__.py"


def _link(folder: pathlib.Path) -> None:
    """Lay the modules out as they are installed, under empty `__init__` files."""
    package = folder / "jaxstate"
    for source, target in (
        (ROOT / "jaxstate", package),
        (ROOT / "models", package / "models"),
        (ROOT / "kernels_pallas", package / "kernels_pallas"),
        (ROOT / "serving", package / "serving"),
    ):
        target.mkdir()
        (target / "__init__.py").touch()
        for path in source.iterdir():
            if path.is_file() and path.name != "__init__.py":
                (target / path.name).symlink_to(path)
    here = pathlib.Path(__file__).parent
    for name in ("chex", "platformdirs"):
        if importlib.util.find_spec(name) is None:
            (folder / f"{name}.py").symlink_to(here / f"device_{name}.py")
    tokenizer = package / "models" / "tokenizer.py"
    tokenizer.unlink()
    tokenizer.symlink_to(here / "device_tokenizer.py")
