#!/bin/bash
# Mixtral 8x7B on 16k tokens, 32 nodes of H100s; one expert a process.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/training/mixtral/run_hf_mixtral_8x7b_seq16k_gpu_p5x32_pretrain.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=training/mixtral/hf_mixtral_8x7b_seq16k_gpu_p5x32_pretrain \
    cluster="${CLUSTER:-slurm}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
