#!/bin/sh
# Lay the top-level folders out as the package they are installed as, for tools that read files
# and do not run the installer's import hooks (type checkers).
set -eu
root=$(pwd)
target=$1/jaxstate
rm -rf "$1"
mkdir -p "$target"
for file in "$root"/jaxstate/*.py; do ln -s "$file" "$target/"; done
for folder in models kernels_pallas serving; do ln -s "$root/$folder" "$target/$folder"; done
