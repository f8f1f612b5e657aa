#!/bin/bash
# One node's share of mine: torchrun and the script. Started again, it goes on from the newest checkpoint.
set -euo pipefail
files=/config
run_dir=${SMP_RUN_DIR:-/fsx/results/mine}
export FI_PROVIDER=${FI_PROVIDER:-efa}
export FI_EFA_USE_HUGE_PAGE=${FI_EFA_USE_HUGE_PAGE:-0}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-'^lo,docker0,veth'}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_DEBUG=WARN
exec python3 "$files/supervise.py" node "$run_dir/status.json" -- \
    python3 -m torch.distributed.run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint mine-0.mine:29500 --rdzv-id mine --nproc-per-node 8 \
    /fsx/mine/train.py --steps 100 --fast
