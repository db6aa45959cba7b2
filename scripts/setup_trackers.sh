#!/usr/bin/env bash
# Installs MLflow, Trackio and SwanLab into .peers/trackers for their tests.
exec "$(dirname "${BASH_SOURCE[0]}")/install_library_folder.sh" trackers "the trackers"
