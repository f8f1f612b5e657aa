#!/bin/bash
# Adapters of Qwen 3 32B on 8k tokens, one node with 8 GPUs of 80 GB.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm HF_MODEL_NAME_OR_PATH=/fsx/models/llama TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/eight-gpus/run_qwen3_32b_seq8k_lora.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../..}"
exec python3 main.py \
    recipes=eight-gpus/qwen3_32b_seq8k_lora \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.load="${HF_MODEL_NAME_OR_PATH:?folder of the model}" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
