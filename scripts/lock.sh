#!/usr/bin/env bash
# Writes the locks of the images: locks/gpu.txt and locks/sglang_gpu.txt (.venv-sglang) for machines with NVIDIA GPUs,
# locks/cpu.txt for others (Linux, x86_64).
# Needs .venv, with any extra, for its uv. Versions in existing locks are kept if possible; `scripts/lock.sh --upgrade`
# selects the newest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pip=(.venv/bin/python -m pip config get)
index=${PIP_INDEX_URL:-$("${pip[@]}" global.index-url 2>/dev/null || true)}
cert=${PIP_CERT:-$("${pip[@]}" global.cert 2>/dev/null || true)}
[[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -n $cert ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}

# For Python 3.11 and newer. A lock contains no index, because every machine may use another one.
export UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh
compile() {
  .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links \
    --no-annotate --output-file "locks/$1.txt" "${@:2}"
}
compile gpu "$@" --extra gpu --extra dev --override locks/gpu_overrides.txt locks/gpu.in pyproject.toml
compile cpu "$@" --extra cpu --extra dev --override scripts/overrides.txt pyproject.toml
compile sglang_gpu "$@" locks/sglang_gpu.in
# The index has torch with CUDA, whose packages the build for CPUs, with the same version, does not need.
sed -E -i '/^(nvidia-|cuda-|triton==)/d; s/^(torch==[0-9.]+)\+cpu/\1/' locks/cpu.txt
