#!/bin/bash
# Adapters of DeepSeek-R1 on 8k tokens, its linear layers in 4 bits. Experts, 98% of it, stay in bf16, so five nodes of H100s.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm HF_MODEL_NAME_OR_PATH=/fsx/models/llama TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/fine-tuning/deepseek/run_hf_deepseek_r1_671b_seq8k_gpu_qlora.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=fine-tuning/deepseek/hf_deepseek_r1_671b_seq8k_gpu_qlora \
    cluster="${CLUSTER:-slurm}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.load="${HF_MODEL_NAME_OR_PATH:?folder of the model}" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
