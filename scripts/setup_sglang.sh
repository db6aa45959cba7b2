#!/usr/bin/env bash
# Makes .venv-sglang: SGLang, the engine of rollout.engine=sglang, in an environment of its own. Safe to repeat; does
# nothing when it is ready.
#
#   EXTRA=cpu|gpu     for CPUs (default), or for NVIDIA GPUs: exactly the versions of locks/sglang_gpu.txt
#   PYTHON=..., TORCH_INDEX_URL=...   as in scripts/setup.sh; the index is for CPUs only
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-sglang
stamp=$venv/.mcore-rl-ready
extra=${EXTRA:-cpu}
lock=locks/sglang_gpu.txt
inputs=(scripts/setup_sglang.sh)
[[ $extra != gpu ]] || inputs+=("$lock")
wanted="$PWD $extra $(cat "${inputs[@]}" | cksum)"
[[ -f $stamp && "$(<"$stamp")" == "$wanted" ]] && { echo "$venv is ready"; exit 0; }

fail() { printf 'setup_sglang: %s\n' "$1" >&2; exit 1; }
[[ $extra == cpu || $extra == gpu ]] || fail "EXTRA=$extra is unknown: cpu or gpu"
python=${PYTHON:-$(command -v .venv/bin/python || command -v python3.11 || command -v python3)} ||
  fail "no Python found; name one: PYTHON=/path/to/python scripts/setup_sglang.sh"

echo "[1/3] making $venv with $("$python" --version)"
rm -rf "$venv"
"$python" -m venv "$venv"
pip_install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

if [[ $extra == cpu ]]; then
  echo "[2/3] installing PyTorch (about 200 MB)"
  # pip first: it alone looks where it was told to (pip.conf) and finds a local torch wheel.
  if [[ -n ${TORCH_INDEX_URL:-} ]]; then
    pip_install --index-url "$TORCH_INDEX_URL" torch==2.13.0
  else
    pip_install torch==2.13.0
  fi
fi
uv=uv
[[ $extra != gpu ]] || uv=$(grep '^uv==' locks/gpu.txt)
pip_install "$uv"
setting() { "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }
index=${PIP_INDEX_URL:-$(setting index-url)}
cert=${PIP_CERT:-$(setting cert)}
[[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -n $cert ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
uv_install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }

install_for_cpus() {
  # What it imports on a CPU; the rest of what it asks for is CUDA's, or serves requests that never come.
  uv_install torch==2.13.0 \
    transformers==5.19.0 tokenizers==0.23.2 numpy aiohttp fastapi uvicorn uvloop orjson msgspec pyzmq psutil pybase64 \
    pydantic python-multipart requests setproctitle sentencepiece==0.2.1 tiktoken tqdm einops interegular pillow \
    prometheus-client partial_json_parser packaging regex openai==2.8.0 openai-harmony==0.0.4 scipy numba==0.65.1 \
    compressed-tensors==0.18.0 xxhash zstandard watchfiles python-dateutil IPython cloudpickle safetensors accelerate \
    jsonschema cffi ninja httpx loguru
  uv_install --no-deps sglang==0.5.23 triton==3.9.0 \
    torchvision==0.28.0 soundfile==0.13.1 dill gguf apache-tvm-ffi==0.1.11 llguidance xgrammar==0.2.7 \
    checkpoint-engine==0.1.2
}

# By uv alone: pip could choose a local wheel of torch's CPU build.
install_for_gpus() {
  uv_install --compile-bytecode --requirement "$lock"
  "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || fail \
    "the installed torch is a build without CUDA: remove its wheel from UV_FIND_LINKS and UV_DEFAULT_INDEX"
}

if [[ $extra == cpu ]]; then
  echo "[3/3] installing SGLang without its CUDA packages"
  install_for_cpus
else
  echo "[2/3] installing SGLang, PyTorch and their CUDA packages (8 GB installed)"
  install_for_gpus
  echo "[3/3] checking what is installed"
fi
"$venv/bin/python" -c 'from importlib.metadata import version; print("sglang", version("sglang"))'
printf '%s' "$wanted" >"$stamp"
