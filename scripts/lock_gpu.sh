#!/usr/bin/env bash
# Writes locks/gpu.txt: compatible versions for a machine with NVIDIA GPUs (Linux, x86_64). Needs .venv, with any extra, for
# its uv. Versions in the existing lock are kept if possible; `scripts/lock_gpu.sh --upgrade` selects the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pip=(.venv/bin/python -m pip config get)
index=${PIP_INDEX_URL:-$("${pip[@]}" global.index-url 2>/dev/null || true)}
cert=${PIP_CERT:-$("${pip[@]}" global.cert 2>/dev/null || true)}
[[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -n $cert ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}

# One lock for Python 3.11 and newer. It contains no index, because every machine may use another one.
UV_CUSTOM_COMPILE_COMMAND=scripts/lock_gpu.sh .venv/bin/uv pip compile --quiet --universal --python-version 3.11 \
  --extra gpu --extra dev --no-emit-index-url --no-annotate --output-file locks/gpu.txt "$@" pyproject.toml locks/gpu.in
