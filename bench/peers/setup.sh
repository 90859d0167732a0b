#!/bin/sh
# Build the environments that `bench_market.py --peers DIR` runs other engines in, with pip alone.
#
#     bench/peers/setup.sh DIR
#
# DIR then holds the environments llamacpp and transformers, and smollm2-135m-f32.gguf: the weights
# as 32-bit floats, so that every engine multiplies the same numbers. Needs a Python of 3.11 or
# later, a C++ compiler and CMake's wheel (llama.cpp is built from source, 6 to 9 minutes on 2
# cores), about 2.5 GB of disk, and this project installed in the Python that is named by
# $JAXSTATE_PYTHON (.venv/bin/python of this repository if not set). What is there already stays.
set -eu

if [ $# -ne 1 ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
ours=${JAXSTATE_PYTHON:-$here/../../.venv/bin/python}
mkdir -p "$1"
dir=$(cd "$1" && pwd)

make_env() { # make_env NAME PACKAGE...
    name=$1
    shift
    if [ -e "$dir/$name/.complete" ]; then
        echo "$dir/$name is there" >&2
        return
    fi
    echo "building $dir/$name: $*" >&2
    "$ours" -m venv "$dir/$name"
    "$dir/$name/bin/python" -m pip install --quiet --no-input "$@"
    touch "$dir/$name/.complete"
}

make_env llamacpp llama-cpp-python==0.3.36
make_env transformers torch==2.13.0 transformers gguf accelerate

model=$dir/smollm2-135m-f32.gguf
if [ ! -e "$model" ]; then
    echo "writing $model" >&2
    source=$("$ours" -c 'from jaxstate.models import sources; print(sources.pull("smollm2-135m"))')
    "$ours" "$here/to_f32.py" "$source" "$model.part"
    mv "$model.part" "$model"
fi
echo "ready: python bench/bench_market.py --peers $1" >&2
