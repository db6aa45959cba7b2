#!/usr/bin/env bash
# Installs mbridge, the peer of `python -m benchmarks mbridge`, into .peers/. .venv has all its dependencies; pip would add
# CUDA packages to .venv if mbridge were installed there. Safe to repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ -x .venv/bin/python ]] || { echo "setup_mbridge: run \`make setup\` first" >&2; exit 1; }
[[ -d .peers/mbridge ]] && { echo ".peers/mbridge exists"; exit 0; }
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target .peers mbridge==0.15.1
echo "installed mbridge 0.15.1 into .peers"
