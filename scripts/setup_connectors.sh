#!/usr/bin/env bash
# Installs Verifiers, Gymnasium, OpenEnv, Inspect and lm-evaluation-harness into .peers/connectors for their tests. In
# .venv they would replace packages that others need; the tests append this folder to the path, so that shared packages
# are those of .venv. Safe to repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=.peers/connectors
[[ -x .venv/bin/python ]] || { echo "setup_connectors: run \`make setup\` first" >&2; exit 1; }
lock=locks/connectors.txt
# The folder has a copy of the lock that it was installed from; another lock replaces it.
cmp -s "$lock" "$target/.lock" && { echo "$target exists"; exit 0; }
mkdir -p .peers
partial=$(mktemp -d .peers/.connectors-XXXXXX) # an interrupted installation leaves no $target
trap 'rm -rf "$partial"' EXIT
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target "$partial" -r "$lock"
cp "$lock" "$partial/.lock"
rm -rf "$target"
mv "$partial" "$target"
echo "installed the libraries of connectors into $target"
