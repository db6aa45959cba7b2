#!/usr/bin/env bash
# Installs Chromium and its driver for tests/browser unless they are installed, and checks that it starts headless.
set -euo pipefail

fail() { printf 'browser: %s\n' "$1" >&2; exit 1; }
install() { "${as_root[@]}" apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null; }

if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
  command -v apt-get >/dev/null || fail 'no apt-get here: install chromium and chromedriver of the same version'
  as_root=()
  if ((EUID)); then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null || fail 'run as root: apt-get install chromium chromium-driver'
    as_root=(sudo -n)
  fi
  export DEBIAN_FRONTEND=noninteractive
  printf 'browser: apt-get install chromium chromium-driver\n'
  install || { "${as_root[@]}" apt-get update >/dev/null && install; }
fi
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# Chromium's own sandbox does not work for root.
timeout 60 chromium --headless --no-sandbox --disable-gpu --user-data-dir="$profile" --dump-dom 'data:text/html,works' 2>/dev/null |
  grep -q works || fail 'chromium is installed, but does not start here'
printf 'browser: %s works\n' "$(chromium --version 2>/dev/null)"
