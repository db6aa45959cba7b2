#!/usr/bin/env bash
# Installs bubblewrap for sandbox.kind=bubblewrap unless it is installed, and checks that it works on this machine.
set -euo pipefail

fail() { printf 'sandbox: %s\n' "$1" >&2; exit 1; }
install() { "${as_root[@]}" apt-get install -y --no-install-recommends bubblewrap >/dev/null; }

if ! command -v bwrap >/dev/null; then
  command -v apt-get >/dev/null || fail 'no apt-get here: install bubblewrap 0.8 or newer'
  as_root=()
  if ((EUID)); then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null || fail 'run as root: apt-get install bubblewrap'
    as_root=(sudo -n)
  fi
  export DEBIAN_FRONTEND=noninteractive
  printf 'sandbox: apt-get install bubblewrap\n'
  install || { "${as_root[@]}" apt-get update >/dev/null && install; }
fi
words=$(bwrap --unshare-all --unshare-user --disable-userns --ro-bind / / true 2>&1) ||
  fail "bubblewrap is installed, but does not work here: $words (docs/sandbox.md lists alternatives)"
printf 'sandbox: %s works\n' "$(bwrap --version)"
