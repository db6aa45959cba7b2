#!/usr/bin/env bash
# Fetches TransformerEngine's Python, without its kernels, for tests/te: into .peers/te, no environment has it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=.peers/te
[[ -d $target/transformer_engine ]] && exit 0
mkdir -p .peers
fetched=$(mktemp -d .peers/te.XXXXXX)
trap 'rm -rf "$fetched"' EXIT
.venv/bin/python -m pip download --disable-pip-version-check -q --no-deps -d "$fetched" transformer-engine==2.11.0
.venv/bin/python -m zipfile -e "$fetched"/transformer_engine-2.11.0-*.whl "$fetched/package"
mv "$fetched/package" "$target"
