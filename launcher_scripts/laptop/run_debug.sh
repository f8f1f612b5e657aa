#!/bin/bash
# A model that trains on synthetic tokens in seconds on any machine: to try a launcher, a cluster or an installation.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm EXP_DIR=/fsx/exp bash launcher_scripts/laptop/run_debug.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../..}"
exec python3 main.py \
    recipes=laptop/debug \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    "$@"
