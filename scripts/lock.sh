#!/usr/bin/env bash
# Writes the locks of the images: locks/gpu.txt for machines with NVIDIA GPUs, locks/cpu.txt for others (Linux, x86_64).
# Needs .venv, with any extra, for its uv. Versions in existing locks are kept if possible; `scripts/lock.sh --upgrade`
# selects the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pip=(.venv/bin/python -m pip config get)
index=${PIP_INDEX_URL:-$("${pip[@]}" global.index-url 2>/dev/null || true)}
cert=${PIP_CERT:-$("${pip[@]}" global.cert 2>/dev/null || true)}
[[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -n $cert ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}

# One lock per extra, for Python 3.11 and newer. It contains no index, because every machine may use another one.
export UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh
compile() {
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --extra "$1" --extra dev --no-emit-index-url \
    --no-emit-find-links --no-annotate --output-file "locks/$1.txt" "${@:2}" pyproject.toml
}
compile gpu "$@" locks/gpu.in
compile cpu "$@" --override scripts/overrides.txt
# The index has torch with CUDA, whose packages the build for CPUs, with the same version, does not need.
sed -E -i '/^(nvidia-|cuda-|triton==)/d; s/^(torch==[0-9.]+)\+cpu/\1/' locks/cpu.txt
