#!/bin/bash
# Llama 3.1 70B on 8k tokens, 32 nodes of A100s with 40 GB.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/training/llama/run_p4_hf_llama3_70b_seq8k_gpu.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=training/llama/p4_hf_llama3_70b_seq8k_gpu \
    cluster="${CLUSTER:-slurm}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
