#!/usr/bin/env bash
# install_library_folder.sh NAME WHAT: installs locks/NAME.txt into .peers/NAME for tests. In .venv the packages would
# replace some that others need; the tests append the folder to the path, so that shared packages are those of .venv.
# Called by setup_NAME.sh. Safe to repeat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1 what=$2
target=.peers/$name
[[ -x .venv/bin/python ]] || { echo "setup_$name: run \`make setup\` first" >&2; exit 1; }
lock=locks/$name.txt
# The folder has a copy of the lock that it was installed from; another lock replaces it.
cmp -s "$lock" "$target/.lock" && { echo "$target exists"; exit 0; }
mkdir -p .peers
partial=$(mktemp -d ".peers/.$name-XXXXXX") # an interrupted installation leaves no $target
trap 'rm -rf "$partial"' EXIT
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --target "$partial" -r "$lock"
cp "$lock" "$partial/.lock"
rm -rf "$target"
mv "$partial" "$target"
echo "installed $what into $target"
