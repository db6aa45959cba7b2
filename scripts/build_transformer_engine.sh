#!/usr/bin/env bash
# Compiles TransformerEngine's extension against the torch of an environment that has locks/gpu.txt: on the index it is
# a source package. Called by scripts/setup.sh.
#
#   scripts/build_transformer_engine.sh [VENV]     default .venv
#   CUDA_HOME=...     CUDA toolkit (default: the one of nvcc on the PATH, else /usr/local/cuda)
#   MAX_JOBS=...      compiler processes (default: by the number of cores)
set -euo pipefail

venv=$(realpath "${1:-.venv}")
log=$venv/transformer_engine.log
fail() { printf 'build_transformer_engine: %s\n' "$1" >&2; exit 1; }

if [[ -z ${CUDA_HOME:-} ]]; then
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
  CUDA_HOME=$(dirname "$(dirname "$nvcc")")
fi
[[ -x $CUDA_HOME/bin/nvcc ]] || fail "$CUDA_HOME/bin/nvcc is missing: install the CUDA toolkit (nvcc) of version 13.0, or
  set CUDA_HOME to its folder"
export CUDA_HOME PATH=$venv/bin:$CUDA_HOME/bin:$PATH # ninja is in the environment

# Headers of the libraries that torch was built with. A toolkit with nvcc may lack headers of cuSPARSE, cuDNN or NCCL.
nvidia=("$venv"/lib/python3.*/site-packages/nvidia)
export CPATH=$nvidia/cu13/include:$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH}
export LIBRARY_PATH=$nvidia/cu13/lib${LIBRARY_PATH:+:$LIBRARY_PATH}

# Without build isolation: pip would build it against the newest torch of the index. Without dependencies, which the lock
# has: pip would replace NCCL with the version that torch pins (locks/gpu_overrides.txt).
build() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --verbose --no-build-isolation --no-deps \
    transformer-engine-torch==2.11.0
}

echo "      log: $log"
build >"$log" 2>&1 && exit 0
# If the compiler fails, the package tries to download a wheel, and the log ends with an error of the network.
echo "      the first error in the log:" >&2
grep -m 1 -A 2 -E '[Ee]rror: |cannot find -l|undefined reference' "$log" >&2 || tail -n 20 "$log" >&2
fail "TransformerEngine could not be built, see $log"
