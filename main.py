"""Launch a recipe on this machine, Slurm, Kubernetes or SageMaker.

    python main.py recipes=laptop/debug
    python main.py recipes=training/mistral/hf_mistral_7b_seq8k_gpu_p5x16_pretrain cluster=slurm

``--help`` says the rest. No torch is needed here, only on the machines that train.
"""

from __future__ import annotations

import sys

from smp.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
