#!/usr/bin/env bash
# Installs MLflow, Trackio and SwanLab into .peers/trackers for their tests. In .venv they would replace packages that
# others need; the tests append this folder to the path, so that shared packages are those of .venv. Safe to repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=.peers/trackers
[[ -x .venv/bin/python ]] || { echo "setup_trackers: run \`make setup\` first" >&2; exit 1; }
lock=locks/trackers.txt
# The folder has a copy of the lock that it was installed from; another lock replaces it.
cmp -s "$lock" "$target/.lock" && { echo "$target exists"; exit 0; }
mkdir -p .peers
partial=$(mktemp -d .peers/.trackers-XXXXXX) # an interrupted installation leaves no $target
trap 'rm -rf "$partial"' EXIT
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target "$partial" -r "$lock"
cp "$lock" "$partial/.lock"
rm -rf "$target"
mv "$partial" "$target"
echo "installed the trackers into $target"
