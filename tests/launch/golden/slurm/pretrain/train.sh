#!/bin/bash
# One node's share of llama-8b-8k-16n: torchrun and the script. Started again, it goes on from the newest checkpoint.
set -euo pipefail
files=/fsx/results/llama-8b-8k-16n
run_dir=${SMP_RUN_DIR:-/fsx/results/llama-8b-8k-16n}
export FI_PROVIDER=${FI_PROVIDER:-efa}
export FI_EFA_USE_HUGE_PAGE=${FI_EFA_USE_HUGE_PAGE:-0}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-'^lo,docker0,veth'}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=WARN
cd /code
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec python3 "$files/supervise.py" node "$run_dir/status.json" -- \
    python3 -m torch.distributed.run --nnodes 16 --rdzv-backend c10d --rdzv-endpoint "$SMP_RENDEZVOUS" --rdzv-id "$SMP_JOB_ID" --nproc-per-node 8 \
    -m pretrain_gpt --config "$files/settings.yaml" --save "$run_dir/checkpoints" --load auto --log-dir "$run_dir" --status-file "$run_dir/status.json" --no-progress-bar
