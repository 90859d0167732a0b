"""Models of the hub, fetched from a real server on loopback; and staying off the network."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import command_line
import hub_server
import huggingface_hub
import model_files
import pytest
from hub_server import Repo
from huggingface_hub import constants

from jaxstate import models
from jaxstate.models import hub, sources

NEEDED = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Content of a tiny model's repository by name, with files that nobody needs."""
    directory = model_files.write_hf_dir(
        tmp_path_factory.mktemp("files"), *model_files.tiny_hf_parts()
    )
    (directory / "tokenizer.json").write_text(json.dumps(model_files.hf_tokenizer()))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    unwanted = ("README.md", "pytorch_model.bin", "original/model.safetensors")
    return found | dict.fromkeys((*unwanted, "consolidated.safetensors"), b"?" * 1000)


@pytest.fixture
def server(files, tmp_path, monkeypatch):
    """A hub with one good model, and an empty cache."""
    with hub_server.serve({"org/tiny": Repo(dict(files))}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.chdir(tmp_path)
        yield running
        huggingface_hub.close_session()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_model_is_fetched_without_what_is_not_needed(server, files):
    path = sources.resolve("org/tiny")
    assert sorted(file.name for file in path.iterdir()) == NEEDED
    assert all((path / name).read_bytes() == files[name] for name in NEEDED)
    assert server.fetched == NEEDED
    loaded = models.load("org/tiny")
    assert loaded.name == "tiny"
    assert loaded.tokenizer.encode(" ab") == [loaded.config.vocab_size - 264 + 260]


def test_second_time_the_cache_answers_without_network(server, request):
    path = sources.resolve("org/tiny")
    huggingface_hub.close_session()  # connections stay open otherwise
    request.getfixturevalue("no_network")
    assert sources.resolve("org/tiny") == path
    with pytest.raises(AssertionError, match="the network was asked"):
        hub.fetch("org/tiny")  # the guard works


def test_local_paths_and_known_names_never_ask_the_network(tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert str(sources.resolve("org/tiny")) == "org/tiny"
    for missing in ("org/tinny", "weights/tiny.gguf", "./org/x", "/org/x", "no-such-model"):
        with pytest.raises(ValueError, match="expected one of .*an existing path or an id"):
            sources.resolve(missing)
    with pytest.raises(ValueError, match="got none; run `jaxstate pull smollm2-135m`"):
        sources.resolve("smollm2-135m", cache_dir=tmp_path)


def test_a_revision_can_be_given(server):
    path = sources.resolve("org/tiny@v1")
    assert path.name == hub_server.SHA
    assert any("/revision/v1" in request for request in server.requests)
    with pytest.raises(ValueError, match="expected a revision of org/tiny, got 'v9', which it doe"):
        sources.resolve("org/tiny@v9")


def test_progress_rises_to_the_bytes_that_are_needed(server, files):
    seen = []
    hub.fetch("org/tiny", progress=lambda *now: seen.append(now))
    total = sum(len(files[name]) for name in NEEDED)
    done = [count for count, _ in seen]
    assert {count for _, count in seen} == {total}
    assert done == sorted(done) and done[-1] == total and len(set(done)) > 2


def test_sharded_model_is_fetched_whole(server, files, tmp_path):
    parts = model_files.tiny_hf_parts()
    directory = model_files.write_hf_dir(tmp_path / "sharded", *parts, num_shards=2)
    shards = {path.name: path.read_bytes() for path in directory.iterdir()}
    server.repos["org/sharded"] = Repo({"tokenizer.json": files["tokenizer.json"], **shards})
    path = sources.resolve("org/sharded")
    assert len(list(path.glob("*.safetensors"))) == 2
    (path / "model-00002-of-00002.safetensors").unlink()  # as an interrupted download leaves it
    assert hub.cached("org/sharded") is None
    assert len(list(sources.resolve("org/sharded").glob("*.safetensors"))) == 2


def test_pull_prints_where_the_model_is(server, capsys, tmp_path):
    result = command_line.run(capsys, "pull", "org/tiny", "--cache-dir", tmp_path)
    assert result.status == 0
    assert result.out.strip() == str(sources.resolve("org/tiny"))
    size = sum(path.stat().st_size for path in sources.resolve("org/tiny").iterdir())
    assert result.err.splitlines() == [
        "fetching org/tiny from the hub …", f"fetched {size:,} bytes"
    ]  # fmt: skip
    result = command_line.run(capsys, "pull", "org/other", "--cache-dir", tmp_path)
    assert (result.status, result.out) == (2, "")
    assert "jaxstate: org/other: expected a model of http" in result.err.splitlines()[-1]


def _only(*names):
    return lambda files: Repo({name: files.get(name, b"x") for name in names})


@pytest.mark.parametrize(
    "repo, message",
    [
        (lambda files: Repo(dict(files), gated=True), "got a gated one; accept its terms at http"),
        (lambda files: None, "got none of this name that you may see; correct the name"),
        (
            _only("config.json", "tokenizer.json", "pytorch_model.bin"),
            r"expected a model with safetensors files, got only .bin, .json; use another copy",
        ),
        (_only("README.md", "a.gguf"), "got only .gguf, .md; download one of its GGUF files"),
        (_only("model.safetensors", "tokenizer.json"), "expected a model with a config.json"),
        (_only("model.safetensors", "config.json"), "expected a model with a tokenizer.json"),
        (_only(), "got only nothing"),
    ],
)
def test_what_cannot_be_had_or_used_is_explained_before_any_download(server, files, repo, message):
    server.repos |= {"org/other": found} if (found := repo(files)) else {}
    with pytest.raises(ValueError, match=f"org/other: .*{message}"):
        models.load("org/other")
    assert server.fetched == []


def test_unreachable_hub_is_one_sentence(server, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match="expected http://127.0.0.1:9 to serve it, got .*check"):
        sources.resolve("org/tiny")


def test_offline_mode_is_honoured_and_uses_what_is_cached(server, tmp_path):
    """In a fresh process with the library's own variables, as users set them."""
    path = sources.resolve("org/tiny")
    count = len(server.requests)
    program = (
        "from jaxstate.models import sources\n"
        "print(sources.resolve('org/tiny'))\n"
        "sources.resolve('org/tiny@v1')"
    )
    variables = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | variables,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(path)]
    assert "org/tiny@v1: expected it in " in done.stderr
    assert "got no complete copy and HF_HUB_OFFLINE is set; unset it" in done.stderr
    assert len(server.requests) == count
