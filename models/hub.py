"""Models of the Hugging Face hub: in the user's cache of it, or fetched into that.

Ids are "organization/name" or "organization/name@revision". HF_ENDPOINT, HF_HOME, HF_TOKEN and
HF_HUB_OFFLINE hold as the `huggingface_hub` library documents them.

Tested against a server on loopback that answers as the hub does to the requests made here; it has
not been tried with the hub itself.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors, utils

from jaxstate.models import safetensors_loader

Progress = Callable[[int, int], None]
"""progress(bytes done, bytes in total)."""

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_WANTED = [
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
_UNWANTED = ["*/*", "consolidated*"]  # other formats of the same weights
_HttpError: Any = errors.HfHubHTTPError.__mro__[1]  # of the HTTP library, which differs by version


def is_id(name: str) -> bool:
    """Return whether a name that is no existing path can only mean a model of the hub.

    A name whose first part is a directory here is a path that was misspelt.
    """
    if not _ID.fullmatch(name) or name.endswith((".gguf", ".safetensors")):
        return False
    return not pathlib.Path(name).exists() and not pathlib.Path(name.split("/")[0]).exists()


def cached(name: str) -> pathlib.Path | None:
    """Return the directory of a model that is complete in the user's cache; asks no network."""
    repo, revision = _parts(name)
    try:
        path = huggingface_hub.snapshot_download(
            repo, revision=revision, local_files_only=True,
            allow_patterns=_WANTED, ignore_patterns=_UNWANTED,
        )  # fmt: skip
    except errors.LocalEntryNotFoundError:
        return None
    return pathlib.Path(path) if _is_complete(pathlib.Path(path)) else None


def fetch(name: str, *, progress: Progress | None = None) -> pathlib.Path:
    """Download a model into the user's cache, as far as it is not there; return its directory.

    Whether it exists, may be had and can be read is found out before anything is downloaded.

    Raises:
      ValueError: no such model or revision, no access to it, not a format that can be loaded, or
        the library is told to stay offline.
      RuntimeError: the hub cannot be reached or the download broke off; what has arrived is kept.
    """
    repo, revision = _parts(name)
    endpoint = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"{name}: expected it in {constants.HF_HUB_CACHE}, got no complete "
            "copy and HF_HUB_OFFLINE is set; unset it to download the model"
        )
    api = huggingface_hub.HfApi()
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True)
        if info.gated:
            api.auth_check(repo)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = _wanted(name, sizes)
        total = sum(sizes[file] for file in wanted)
        path = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED,
            tqdm_class=_bar_class(progress, total) if progress else None,
        )  # fmt: skip
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{name}: expected a model that you may download, got a gated one; accept its terms at "
            f"{endpoint}/{repo} and log in with `hf auth login` or HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{name}: expected a revision of {repo}, got {revision!r}, which it does not have; "
            f"give one of {endpoint}/{repo}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{name}: expected a model of {endpoint}, got none of this name that you may see; "
            "correct the name, or log in with `hf auth login` if it is private"
        ) from error
    except (_HttpError, OSError) as error:
        raise RuntimeError(
            f"{name}: expected {endpoint} to serve it, got {type(error).__name__} ({error}); check "
            "the network and try again, what has arrived is kept"
        ) from error
    if progress is not None:
        progress(total, total)
    return pathlib.Path(path)


def _parts(name: str) -> tuple[str, str]:
    repo, _, revision = name.partition("@")
    return repo, revision or "main"


def _is_complete(directory: pathlib.Path) -> bool:
    """Return whether all is there; other programs keep parts of models in the same cache."""
    try:
        safetensors_loader.weight_files(directory)
    except ValueError:
        return False
    return all((directory / file).is_file() for file in ("config.json", "tokenizer.json"))


def _wanted(name: str, files: Iterable[str]) -> list[str]:
    """Return the files to fetch.

    Raises:
      ValueError: they are not all there.
    """
    files = list(files)
    wanted = list(
        utils.filter_repo_objects(files, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    )
    for needed, suffix in (
        ("safetensors files", ".safetensors"),
        ("a config.json", "config.json"),
        ("a tokenizer.json", "tokenizer.json"),
    ):
        if not any(file.endswith(suffix) for file in wanted):
            kinds = sorted({pathlib.PurePath(file).suffix or file for file in files})
            remedy = "use another copy of the model"
            if ".gguf" in kinds:
                remedy = "download one of its GGUF files and give the path of that"
            raise ValueError(
                f"{name}: expected a model with {needed}, got only {', '.join(kinds) or 'nothing'}"
                f"; {remedy}"
            )
    return wanted


def _bar_class(progress: Progress, total: int) -> type:
    """Return a class of progress bars that draw nothing and report bytes.

    The library keeps several bars of bytes, which count the same download at different points.
    """
    done: dict[int, int] = {}

    class Bar(utils.tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts_bytes:
                done[id(self)] = done.get(id(self), 0) + int(n or 0)
                if (most := max(done.values())) < total:  # the end is told once, by `fetch`
                    progress(most, total)

    return Bar
