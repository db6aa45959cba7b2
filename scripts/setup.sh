#!/usr/bin/env bash
# Makes .venv ready, and does nothing when it is. Safe to repeat, to interrupt and to run twice at once.
#
#   EXTRA=cpu|gpu          which extra of pyproject.toml to install (default cpu)
#   LOCKED=1               install exactly the versions of locks/cpu.txt (EXTRA=gpu always uses locks/gpu.txt)
#   PYTHON=...             the interpreter to use (default: the first of python3.11, 3.12, 3.13, python3 that fits)
#   TORCH_INDEX_URL=...    index of PyTorch's CPU wheels, for machines whose package index has none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${EXTRA:-cpu}
venv=.venv
stamp=$venv/.mcore-rl-ready
unfinished=$venv/.mcore-rl-unfinished
overrides=scripts/overrides.txt
[[ $extra != gpu ]] || overrides=locks/gpu_overrides.txt
inputs=(pyproject.toml "$overrides" scripts/setup.sh)
[[ $extra != gpu ]] || inputs+=(scripts/build_transformer_engine.sh)
packages=(-e ".[$extra,dev]")
lock=
if [[ $extra == gpu || -n ${LOCKED:-} ]]; then
  lock=locks/$extra.txt
  inputs+=("$lock")
  packages=(-r "$lock" -e .) # the lock's versions and no others; refused where pyproject.toml asks for more
fi
wanted="$PWD $extra $(cat "${inputs[@]}" | cksum)"

is_ready() { [[ -f $stamp && "$(<"$stamp")" == "$wanted" && -x $venv/bin/python ]]; }
is_ready && exit 0

# The lock is on a file that is always here, so nothing is left to clean up.
if command -v flock >/dev/null; then
  exec 9<pyproject.toml
  flock -n 9 || { echo "setup: another set-up is at work here, waiting for it"; flock 9; }
  is_ready && exit 0
fi

started=$SECONDS
say() { printf '[%s] %s (%d s so far)\n' "$1" "$2" "$((SECONDS - started))"; }
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

fits() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if fits "$candidate"; then command -v "$candidate"; return; fi
  done
  fail "no Python >= 3.11 with venv and ensurepip found (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3}).
  Install one (Debian, Ubuntu: apt install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python make setup"
}

# A directory from an interrupted set-up, a moved checkout or another interpreter is not worth mending: start over.
# One that somebody made by hand is kept and completed.
must_rebuild() {
  [[ -e $venv ]] || return 1
  [[ -e $unfinished ]] && return 0
  [[ -f $stamp && "$(<"$stamp")" != "$PWD $extra "* ]] && return 0
  ! "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

create_venv() {
  if must_rebuild; then
    echo "      $venv is unfinished, broken or from elsewhere: removing it"
    rm -rf "$venv"
  fi
  mkdir -p "$venv"
  touch "$unfinished"
  rm -f "$stamp"
  [[ -x $venv/bin/python ]] || "$1" -m venv "$venv"
}

# pip first: it alone looks where it was told to (pip.conf) and finds a local torch wheel.
pip_options=(--disable-pip-version-check)
[[ -t 1 ]] || pip_options+=(-qq)
pip_install() { "$venv/bin/python" -m pip install "${pip_options[@]}" "$@"; }

# GPU machines get torch from the lock, by uv. pip could choose a local wheel of the CPU build, such as 2.13.0+cpu from
# its find-links, which also satisfies the lock.
install_torch() {
  if [[ -n ${TORCH_INDEX_URL:-} ]]; then
    pip_install --index-url "$TORCH_INDEX_URL" torch==2.13.0
  else
    pip_install torch==2.13.0
  fi
  if ! "$venv/bin/python" -c 'import importlib.metadata as m, sys; sys.exit("+cpu" not in m.version("torch"))'; then
    echo "      note: the index gave a CUDA build of torch. It works, but is large; the CPU build needs"
    echo "      TORCH_INDEX_URL=<the CPU wheel index named on PyTorch's installation page> make setup"
  fi
}

check_torch_has_cuda() {
  "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' || fail \
    "the installed torch is a build without CUDA: remove its wheel from the find-links and indexes of pip and uv
  (pip config list; PIP_FIND_LINKS, UV_FIND_LINKS, UV_DEFAULT_INDEX), then run make setup EXTRA=gpu again"
}

# uv resolves in seconds what takes pip minutes, but does not read pip's settings.
uv_from_pip() {
  local pip=("$venv/bin/python" -m pip config get) index cert
  index=${PIP_INDEX_URL:-$("${pip[@]}" global.index-url 2>/dev/null || true)}
  cert=${PIP_CERT:-$("${pip[@]}" global.cert 2>/dev/null || true)}
  [[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
  [[ -n $cert ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

uv_requirement() { if [[ -n $lock ]]; then grep '^uv==' "$lock"; else echo uv; fi; }

install_packages() {
  if pip_install "$(uv_requirement)"; then
    uv_from_pip
    local quiet=()
    [[ -t 1 ]] || quiet=(--quiet)
    # Byte code once, here: else every process of a run compiles what it imports, where none may be written later.
    "$venv/bin/uv" pip install "${quiet[@]}" --compile-bytecode --python "$venv/bin/python" \
      --override "$overrides" "${packages[@]}" && return
    echo "      uv did not manage, trying pip (slower)"
  fi
  if [[ -n $lock ]]; then
    pip_install --no-deps "${packages[@]}" # pip knows no overrides, and the lock is complete
    return
  fi
  pip_install "${packages[@]}"
  if [[ $extra == cpu ]]; then
    "$venv/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec
  fi
}

[[ $extra == cpu || $extra == gpu ]] || fail "EXTRA=$extra is unknown: cpu or gpu"
python=$(find_python) || exit 1
say 1/4 "making $venv with $("$python" --version) ($python)"
create_venv "$python"
if [[ $extra == cpu ]]; then
  say 2/4 "installing PyTorch (about 200 MB)"
  install_torch || fail "PyTorch could not be installed: is a package index reachable? (pip config list)"
  say 3/4 "installing vLLM, Megatron-Core, Ray and the rest (extra 'cpu', about 1 GB)"
  install_packages || fail "the packages could not be installed, see above; running it again starts over"
else
  say 2/4 "installing PyTorch, vLLM, Megatron-Core, Ray and the rest (extra 'gpu', 9 GB installed)"
  install_packages || fail "the packages could not be installed, see above; running it again starts over"
  check_torch_has_cuda
  say 3/4 "building TransformerEngine's extension for torch (with 2 cores 18 minutes; MAX_JOBS limits the processes)"
  scripts/build_transformer_engine.sh "$venv"
fi
say 4/4 "checking what is installed"
"$venv/bin/python" -m mcore_rl.cli doctor --missing || echo "      note: the packages above are missing; the full report: mcore-rl doctor"
rm -f "$unfinished"
printf '%s' "$wanted" >"$stamp.tmp"
mv "$stamp.tmp" "$stamp"
say done "$venv is ready; activate it with: source $venv/bin/activate"
