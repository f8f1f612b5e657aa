#!/bin/bash
# What "make finetune-demo" trains: adapters that teach the demo's model to write docstrings, in minutes on two CPU cores.
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm HF_MODEL_NAME_OR_PATH=/fsx/models/llama TRAIN_DIR=/fsx/data/corpus EXP_DIR=/fsx/exp bash launcher_scripts/laptop/run_finetune_demo.sh [key=value ...]
set -euo pipefail
cd "${SMP_DIR:-$(dirname "$0")/../..}"
exec python3 main.py \
    recipes=laptop/finetune_demo \
    cluster="${CLUSTER:-local}" \
    base_results_dir="${EXP_DIR:-results}/results" \
    recipes.load="${HF_MODEL_NAME_OR_PATH:?folder of the model}" \
    recipes.data_path="${TRAIN_DIR:?training data}" \
    "$@"
