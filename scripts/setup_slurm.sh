#!/usr/bin/env bash
# Installs SLURM's daemons and commands, and munge, for tests/e2e/test_slurm.py. Does nothing if they are installed.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin
missing=()
for program in munged slurmctld slurmd sbatch srun scontrol; do
  command -v "$program" >/dev/null || missing+=("$program")
done
((${#missing[@]})) || exit 0

fail() { printf 'slurm: %s\n' "$1" >&2; exit 1; }
command -v apt-get >/dev/null || fail "${missing[*]} missing, and no apt-get here: install SLURM (slurmctld, slurmd, commands) and munge"
as_root=()
if ((EUID)); then
  command -v sudo >/dev/null && sudo -n true 2>/dev/null || fail "${missing[*]} missing: run as root: apt-get install slurm-wlm munge"
  as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
install() { "${as_root[@]}" apt-get install -y --no-install-recommends slurm-wlm munge >/dev/null; }
install || { "${as_root[@]}" apt-get update >/dev/null && install; }
