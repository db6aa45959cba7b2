#!/usr/bin/env bash
# Installs Verifiers, Gymnasium, OpenEnv, Inspect and lm-evaluation-harness into .peers/connectors for their tests.
exec "$(dirname "${BASH_SOURCE[0]}")/install_library_folder.sh" connectors "the libraries of connectors"
