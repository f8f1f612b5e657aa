#!/bin/bash
# Runs a recipe of the collection; `python3 main.py --list` names them all.
#
#     EXP_DIR=/fsx/exp bash launcher_scripts/run.sh RECIPE [key=value ...]
#
# Read from the environment, as HyperPod's own scripts do:
#   EXP_DIR                where jobs' folders are made, below results/ (default: here)
#   HF_MODEL_NAME_OR_PATH  folder of the model that a recipe fine-tunes
#   TRAIN_DIR              training data
#   CLUSTER                local, slurm, k8s or sm_jobs (default: this machine, or Slurm for several nodes)
#   SMP_DIR                a checkout of this project (default: the one that this script is in)
# More words are passed on: keys of main.py.
set -euo pipefail
recipe=${1:?give the name of a recipe: python3 main.py --list}
shift
words=("recipes=$recipe" "base_results_dir=${EXP_DIR:-$PWD}/results")
[ -z "${CLUSTER:-}" ] || words+=("cluster=$CLUSTER")
[ -z "${HF_MODEL_NAME_OR_PATH:-}" ] || words+=("recipes.load=$HF_MODEL_NAME_OR_PATH")
[ -z "${TRAIN_DIR:-}" ] || words+=("recipes.data_path=$TRAIN_DIR")
exec python3 "${SMP_DIR:-$(dirname "$0")/..}/main.py" "${words[@]}" "$@"
