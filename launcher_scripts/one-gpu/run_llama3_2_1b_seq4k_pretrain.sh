#!/bin/bash
# Llama 3.2 1B on 4k tokens, one GPU with 80 GB.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/one-gpu/run_llama3_2_1b_seq4k_pretrain.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../..}"
exec python3 main.py \
    recipes=one-gpu/llama3_2_1b_seq4k_pretrain \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
