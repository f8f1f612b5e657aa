#!/bin/bash
# Llama 3.1 8B on 128k tokens, 16 nodes of H100s: each sequence is cut over the 8 processes of a node.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/training/llama/run_hf_llama3_8b_seq128k_gpu_p5x16_pretrain.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=training/llama/hf_llama3_8b_seq128k_gpu_p5x16_pretrain \
    cluster="${CLUSTER:-slurm}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
