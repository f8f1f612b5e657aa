#!/bin/bash
# Adapters of GPT-OSS 20B on 16k tokens, one node of H100s.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm HF_MODEL_NAME_OR_PATH=/fsx/models/llama TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/fine-tuning/gpt_oss/run_hf_gpt_oss_20b_seq16k_gpu_lora.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=fine-tuning/gpt_oss/hf_gpt_oss_20b_seq16k_gpu_lora \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.load="${HF_MODEL_NAME_OR_PATH:?folder of the model}" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
