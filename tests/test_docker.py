"""The container: what can be known of it without building the image."""

from __future__ import annotations

import fnmatch
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import certificates
import dockerfile
import grpc_service
import pytest
import served
from dockerfile import ROOT
from grpc_health.v1 import health_pb2

from jaxstate.serving import candle_rows, cli
from jaxstate.serving.tls import Tls


def _copied() -> dict[str, str]:
    """Sources of COPY and where they go."""
    found = {}
    for words in map(str.split, dockerfile.all_of("COPY")):
        for source in words[:-1]:
            found[source] = words[-1] + source if words[-1].endswith("/") else words[-1]
    return found


def _check_health(python: object, address: str, cwd: pathlib.Path, ca: str = "") -> int:
    """Run HEALTHCHECK; the folder must not be ROOT, where ./jaxstate is not what is installed."""
    command = dockerfile.health_command()
    assert command[0] == "python"
    where = {"HEALTH_ADDRESS": address, "HEALTH_TLS_CA": ca}
    environment = {**os.environ, **dockerfile.environment(), **where}
    return subprocess.run(
        [str(python), *command[1:]], env=environment, cwd=cwd, stderr=subprocess.DEVNULL,
        timeout=60, check=False,
    ).returncode  # fmt: skip


def test_all_that_the_package_is_built_from_is_copied_and_not_ignored():
    patterns = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"
    ]
    assert patterns[0] == "*"
    allowed = {pattern[1:] for pattern in patterns if pattern[0] == "!"}
    assert set(_copied()) == allowed
    assert allowed == {
        "pyproject.toml", "README.md", "LICENSE", "jaxstate", "models", "kernels_pallas", "serving"
    }  # fmt: skip
    for source, target in _copied().items():
        assert (ROOT / source).exists() and target == f"/source/{source}"
    ignored = [pattern.removeprefix("**/") for pattern in patterns if pattern[:3] == "**/"]
    kept = [path for folder in ("models", "serving") for path in (ROOT / folder).rglob("*")]
    assert all(
        "__pycache__" in path.parts
        for path in kept
        if any(fnmatch.fnmatch(part, pattern) for pattern in ignored for part in path.parts)
    )


def test_nobody_is_root_where_the_server_starts():
    names = [name for name, _ in dockerfile.instructions()]
    user = dockerfile.one_of("USER")
    assert user != "root" and names.index("USER") < names.index("ENTRYPOINT")
    assert any(
        f"useradd --create-home --uid 10001 {user}" in run for run in dockerfile.all_of("RUN")
    )
    folders = json.loads(dockerfile.one_of("VOLUME"))
    assert any(f"chown {user} {' '.join(folders)}" in run for run in dockerfile.all_of("RUN"))
    cache = dockerfile.environment()["JAXSTATE_CACHE"]
    assert pathlib.PurePath(cache).is_relative_to(folders[0])
    assert dockerfile.environment()["XDG_CACHE_HOME"] == folders[0]


def test_the_ports_are_those_of_a_server_that_is_told_nothing(monkeypatch):
    options = []
    monkeypatch.setattr(cli.serve_command, "run", lambda given, **_: options.append(given))
    monkeypatch.setattr(cli.compile_cache, "enable", lambda _: None)
    entry = json.loads(dockerfile.one_of("ENTRYPOINT"))
    assert entry[0] == "jaxstate" and cli.main([*entry[1:], "m"]) == 0
    ports = f"{options[0].server.port} {options[0].metrics_port}"
    assert dockerfile.one_of("EXPOSE") == ports
    port = dockerfile.environment()["HEALTH_ADDRESS"].rpartition(":")[2]
    assert port == str(options[0].server.port)


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_server_is_healthy_when_it_serves_and_not_before(tmp_path, with_tls):
    authority = certificates.Authority(tmp_path, "authority")
    cert, key = authority.sign("server", "localhost")
    tls = Tls(cert=cert, key=key) if with_tls else None
    ca = str(authority.path) if with_tls else ""
    with grpc_service.bound(tls=tls) as (loop, server, _, port):
        address = f"localhost:{port}"
        assert _check_health(sys.executable, address, tmp_path, ca) == 1
        loop.run(server._set_health(health_pb2.HealthCheckResponse.SERVING))
        assert _check_health(sys.executable, address, tmp_path, ca) == 0
    assert _check_health(sys.executable, address, tmp_path, ca) == 1


@pytest.mark.long
def test_the_steps_of_the_image_lead_to_a_healthy_server(tmp_path):
    """RUN, ENTRYPOINT and HEALTHCHECK in an empty environment; dependencies are those of here."""
    source, home = tmp_path / "source", tmp_path / "home"
    source.mkdir()
    for name in _copied():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    bin_dir = home / "bin"
    site = next((home / "lib").glob("python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "here.pth").write_text("\n".join(here))  # the .pth files in these are not read
    (install,) = [run for run in dockerfile.all_of("RUN") if "pip install" in run]
    environment = {
        **os.environ, **dockerfile.environment(), "EXTRA": "", "PIP_NO_DEPS": "1",
        "PATH": f"{bin_dir}:{os.environ['PATH']}", "JAXSTATE_CACHE": str(tmp_path / "cache"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    subprocess.run(
        ["sh", "-c", install.replace("/source", str(source))], env=environment, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert not source.exists() and (site / "jaxstate" / "serving").is_dir()

    entry = json.loads(dockerfile.one_of("ENTRYPOINT"))
    data = site / "jaxstate" / "serving" / candle_rows.MODEL.relative_to(ROOT / "serving")
    command = [bin_dir / entry[0], *entry[1:], data, "--host", "0.0.0.0", "--force"]
    command += ["--port", 0, "--metrics-port", 0, "--state-dir", tmp_path / "state"]
    command += ["--max-model-len", 16]  # fewer programs
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=log, text=True,
        )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            serving = served.Serving(
                process=process, log=tmp_path / "log", ready=process.stdout.readline()
            )
            address = f"127.0.0.1:{serving.port}"
            assert _check_health(bin_dir / "python", address, tmp_path) == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(served.WAIT_S) == 0
            assert _check_health(bin_dir / "python", address, tmp_path) != 0
        finally:
            if process.poll() is None:
                process.kill()
