#!/bin/bash
# Llama 3.1 8B on 8k tokens, one node with 8 GPUs of 80 GB.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/eight-gpus/run_llama3_8b_seq8k_pretrain.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../..}"
exec python3 main.py \
    recipes=eight-gpus/llama3_8b_seq8k_pretrain \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
