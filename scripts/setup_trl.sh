#!/usr/bin/env bash
# Makes .venv-trl: TRL, the peer of `make bench ARGS=whole_step` and of tests/distributed/test_trl.py, in its own environment.
# Safe to repeat; does nothing when it is ready. PYTHON and TORCH_INDEX_URL as in scripts/setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-trl
stamp=$venv/.mcore-rl-ready
wanted="$PWD $(cksum <scripts/overrides.txt) $(cksum <scripts/setup_trl.sh)"
[[ -f $stamp && "$(<"$stamp")" == "$wanted" ]] && { echo "$venv is ready"; exit 0; }

fail() { printf 'setup_trl: %s\n' "$1" >&2; exit 1; }
python=${PYTHON:-$(command -v .venv/bin/python || command -v python3.11 || command -v python3)} ||
  fail "no Python found; name one: PYTHON=/path/to/python scripts/setup_trl.sh"

echo "[1/3] making $venv with $("$python" --version)"
rm -rf "$venv"
"$python" -m venv "$venv"
pip_install() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }

echo "[2/3] installing PyTorch (about 200 MB)"
# pip first: it alone looks where it was told to (pip.conf) and finds a local torch wheel.
if [[ -n ${TORCH_INDEX_URL:-} ]]; then
  pip_install --index-url "$TORCH_INDEX_URL" torch==2.13.0
else
  pip_install torch==2.13.0
fi
pip_install uv

echo "[3/3] installing TRL"
# uv does not read pip's settings.
setting() { "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }
index=${PIP_INDEX_URL:-$(setting index-url)}
cert=${PIP_CERT:-$(setting cert)}
[[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
[[ -n $cert ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
# The same transformers as ours, so that both sides run the same model code where they share it.
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override scripts/overrides.txt \
  trl==1.16.0 transformers==5.19.0 accelerate datasets
"$venv/bin/python" -c 'import trl; print("trl", trl.__version__)'
printf '%s' "$wanted" >"$stamp"
