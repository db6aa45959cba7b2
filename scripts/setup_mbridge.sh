#!/usr/bin/env bash
# Puts mbridge, the peer that `python -m benchmarks mbridge` measures conversions against, into .peers/. It needs
# nothing that .venv does not have; installed there it would pull CUDA packages. Safe to repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ -x .venv/bin/python ]] || { echo "setup_mbridge: run \`make setup\` first" >&2; exit 1; }
[[ -d .peers/mbridge ]] && { echo ".peers/mbridge is there"; exit 0; }
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target .peers mbridge==0.15.1
echo "installed mbridge 0.15.1 into .peers"
