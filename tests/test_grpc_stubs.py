"""The committed messages are those of jaxstate.proto, under old and new protobuf runtimes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from jaxstate.serving import jaxstate_pb2, jaxstate_pb2_grpc

ROOT = pathlib.Path(__file__).parents[1]
OLDEST = ("protobuf==5.29.*", "grpcio==1.71.2")
LOAD = """
import sys, types
for name, path in (("jaxstate", None), ("jaxstate.serving", {serving!r})):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [path] if path else []
from jaxstate.serving import jaxstate_pb2, jaxstate_pb2_grpc
import google.protobuf
given = jaxstate_pb2.AppendRequest(session_id="s", sequence=7)
assert jaxstate_pb2.AppendRequest.FromString(given.SerializeToString()) == given
print(google.protobuf.__version__, len(vars(jaxstate_pb2_grpc.JaxStateServicer)))
"""


def _run(*command, **options):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
    return done


def _installed(target, *requirements):
    done = _run(sys.executable, "-m", "pip", "install", "-q", "--target", target, *requirements)
    if done.returncode:
        pytest.skip(f"{requirements} cannot be installed here: {done.stderr[-300:]}")
    return target


def _load(packages=None):
    program = LOAD.format(serving=str(ROOT / "serving"))
    isolated = ("-S", "-I") if packages else ()
    if packages:
        program = f"import sys\nsys.path.append({str(packages)!r})\n{program}"
    return _run(sys.executable, *isolated, "-c", program)


def test_every_method_has_a_handler_and_a_stub():
    methods = {
        method.name for method in jaxstate_pb2.DESCRIPTOR.services_by_name["JaxState"].methods
    }
    assert methods <= set(vars(jaxstate_pb2_grpc.JaxStateServicer))


def test_they_load_under_the_installed_runtime():
    done = _load()
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_they_load_under_the_oldest_runtime(tmp_path):
    done = _load(_installed(tmp_path, *OLDEST))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5.29")


@pytest.mark.long
def test_they_are_what_the_compiler_makes_of_the_proto(tmp_path):
    packages = _installed(tmp_path / "packages", "grpcio-tools==1.71.*")
    made = tmp_path / "made"
    made.mkdir()
    arguments = [
        "protoc", f"-Ijaxstate/serving={ROOT / 'serving'}", f"--python_out={made}",
        f"--pyi_out={made}", f"--grpc_python_out={made}", "jaxstate/serving/jaxstate.proto",
    ]  # fmt: skip
    program = f"""
import sys
sys.path.append({str(packages)!r})
from grpc_tools import protoc
sys.exit(protoc.main({arguments!r}))
"""
    done = _run(sys.executable, "-S", "-I", "-c", program)
    assert done.returncode == 0, done.stderr
    files = sorted((made / "jaxstate" / "serving").iterdir())
    assert len(files) == 3
    for file in files:
        assert (ROOT / "serving" / file.name).read_text() == file.read_text(), "run `make stubs`"
