#!/bin/bash
# Llama 3.2 3B on 8k tokens, one node of H100s.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/training/llama/run_hf_llama3_2_3b_seq8k_gpu_p5x1_pretrain.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=training/llama/hf_llama3_2_3b_seq8k_gpu_p5x1_pretrain \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
