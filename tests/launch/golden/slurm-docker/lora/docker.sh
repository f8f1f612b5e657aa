#!/bin/bash
# One node's share of llama-70b-8k-lora, in a container.
set -euo pipefail
devices=()
for device in /dev/infiniband/uverbs* /dev/gdrdrv; do
    if [ -e "$device" ]; then devices+=(--device="$device"); fi
done
exec docker run --rm --gpus all --net host --ipc host --ulimit memlock=-1 --ulimit stack=67108864 "${devices[@]}" \
    -e SMP_RUN_DIR -e SMP_RENDEZVOUS -e SMP_JOB_ID -e SLURM_ARRAY_TASK_ID \
    -v /fsx/results/llama-70b-8k-lora:/fsx/results/llama-70b-8k-lora -v /code:/code --runtime=nvidia \
    smp:1 \
    bash -c 'exec bash /fsx/results/llama-70b-8k-lora/train.sh'
