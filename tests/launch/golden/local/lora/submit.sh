#!/bin/bash
# Runs llama-70b-8k-lora on this machine, and again when it fails, until it is done or makes no progress.
set -euo pipefail
run_dir=/fsx/results/llama-70b-8k-lora
exec python3 "$run_dir/supervise.py" job "$run_dir" "$run_dir/checkpoints" 3 -- bash "$run_dir/train.sh"