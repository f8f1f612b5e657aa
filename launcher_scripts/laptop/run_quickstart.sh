#!/bin/bash
# What "make demo" trains: a small Llama that beats a bigram model of the same tokens within minutes on two CPU cores.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/laptop/run_quickstart.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../..}"
exec python3 main.py \
    recipes=laptop/quickstart \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
