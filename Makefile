# make setup     build .venv
# make demo      candles stream into sessions on two models; everything else it needs it fetches
# make test      lint, types and tests, under 12 minutes on 2 cores
# make test-all  the long suites too, under 60 minutes
# make stubs     generate the messages of serving/jaxstate.proto anew
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# A file's tests stay in one process: they share what they compiled.
WORKERS ?= --numprocesses 2 --dist loadfile

.PHONY: setup demo check test test-all bench stubs clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxstate needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test,bench]'
	touch $@

demo: setup
	$(BIN)/jaxstate pull smollm2-135m
	$(BIN)/jaxstate demo market
	$(BIN)/jaxstate demo questions

check: setup
	$(BIN)/ruff check .
	sh tests/link_packages.sh build/types
	$(BIN)/basedpyright

test: check
	$(BIN)/python -m pytest -m "not long" $(WORKERS)

test-all: check
	$(BIN)/python -m pip install --quiet --editable '.[test,bench,notebooks]'
	$(BIN)/python -m pytest $(WORKERS)

bench: setup
	$(BIN)/python bench/bench_market.py

# Made by an old compiler, so that old and new protobuf runtimes load them.
stubs:
	$(PYTHON) -m venv build/stubs
	build/stubs/bin/python -m pip install --quiet 'grpcio-tools==1.71.*'
	build/stubs/bin/python -m grpc_tools.protoc -Ijaxstate/serving=serving --python_out=build/stubs \
		--pyi_out=build/stubs --grpc_python_out=build/stubs jaxstate/serving/jaxstate.proto
	mv build/stubs/jaxstate/serving/jaxstate_pb2* serving/

clean:
	rm -rf .venv build/types build *.egg-info
