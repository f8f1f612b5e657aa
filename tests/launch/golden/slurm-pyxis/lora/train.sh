#!/bin/bash
# One node's share of llama-70b-8k-lora: torchrun and the script. Started again, it goes on from the newest checkpoint.
set -euo pipefail
files=/fsx/results/llama-70b-8k-lora
run_dir=${SMP_RUN_DIR:-/fsx/results/llama-70b-8k-lora}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-'^lo,docker0,veth'}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=WARN
cd /code
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec python3 "$files/supervise.py" node "$run_dir/status.json" -- \
    python3 -m torch.distributed.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$SMP_RENDEZVOUS" --rdzv-id "$SMP_JOB_ID" --nproc-per-node 8 \
    -m finetune --config "$files/settings.yaml" --save "$run_dir/checkpoints" --resume --log-dir "$run_dir" --status-file "$run_dir/status.json" --no-progress-bar
