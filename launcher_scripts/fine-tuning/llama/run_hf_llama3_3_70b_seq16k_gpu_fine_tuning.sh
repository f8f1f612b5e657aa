#!/bin/bash
# All weights of Llama 3.3 70B on 16k tokens, nodes of H100s.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm HF_MODEL_NAME_OR_PATH=/fsx/models/llama TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/fine-tuning/llama/run_hf_llama3_3_70b_seq16k_gpu_fine_tuning.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../../..}"
exec python3 main.py \
    recipes=fine-tuning/llama/hf_llama3_3_70b_seq16k_gpu_fine_tuning \
    cluster="${CLUSTER:-slurm}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.load="${HF_MODEL_NAME_OR_PATH:?folder of the model}" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
