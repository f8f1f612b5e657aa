# make env      .venv with everything, once; other targets do it for you
# make demo     corpus, tokenizer, training on two processes, a loss curve and a sample, in minutes on a CPU
# make finetune-demo   the demo's model learns to write docstrings (LoRA), in minutes on a CPU
# make moe-demo        a mixture of experts beside a dense model of as many active parameters, in minutes on a CPU
# make rl-demo         a tiny model learns to sort digits by rewards alone (GRPO), in minutes on a CPU
# make vision-demo     a tiny vision-language model learns to name drawn shapes, in minutes on a CPU
# make test     tests; make test-slow: the long ones; make check: lint, format, types, import directions
# make test-slurm   jobs on a throwaway Slurm of this machine; says what to install where there is none
# make parity   the errors of the parity matrix, written to docs/parity.md
# make fuzz-parity MINUTES=20 SEED=0   random layouts and settings against one process, written there too
# make bench    benchmarks of this machine; make bench-cpu: the tables of make gpu on a CPU
# make gpu      all that needs a GPU, with the machine's own python; installs nothing; MINUTES=8: the parts that fit, and
#               the next call goes on; ONLY=layouts: parts of that name
# make gpu-check   that every part of make gpu can run, as far as a machine without a GPU can tell; says what is left out
# make gpu-multi   the parity matrix on NCCL, on a machine with 2 to 8 GPUs
#
# Which torch: the default index has a CUDA build for Linux, so a machine with an NVIDIA GPU needs no more than "make env".
# Without a GPU a CPU build saves gigabytes (2.7 GB in all): name its index
# (pytorch.org/get-started shows the address):
#     make env TORCH_INDEX=ADDRESS
# TORCH_INSTALL chooses another version or a wheel file, PIP_ARGS is passed to every pip command that installs.

PYTHON ?= python3
VENV ?= .venv
TORCH_INSTALL ?= torch==2.13.0
TORCH_INDEX ?=
PIP_ARGS ?=
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip
READY = $(VENV)/.ready

.PHONY: env demo finetune-demo moe-demo rl-demo vision-demo test test-slow test-slurm parity fuzz-parity check bench bench-cpu gpu gpu-check gpu-multi clean
.DELETE_ON_ERROR:

env: $(READY)

# torch comes first and alone, because only torch is to come from TORCH_INDEX. What it needs follows with the rest, whose
# constraints leave out torch: it is there, in the version that was asked for.
$(READY): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) $(if $(TORCH_INDEX),-i $(TORCH_INDEX)) --no-deps "$(TORCH_INSTALL)"
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install $(PIP_ARGS) -c $(VENV)/constraints.txt -e ".[test,plot,dev]"
	@touch $@

demo: $(READY)
	$(BIN)/python tools/demo.py

finetune-demo: $(READY)
	$(BIN)/python tools/demo.py --finetune

moe-demo: $(READY)
	$(BIN)/python tools/demo.py --experts

rl-demo: $(READY)
	$(BIN)/python tools/demo.py --rl

vision-demo: $(READY)
	$(BIN)/python examples/vision_demo.py demo/vision

# Two workers: a file whose tests start up to eight processes, and one that waits for something else. Files in the order of
# tests/conftest.py, which has the dearest first.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -m "slow and not gpu"

test-slurm: $(READY)
	@command -v sbatch slurmctld slurmd munged > /dev/null || \
	    echo "missing: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
	@test -n "$(SMP_SLURMLAB)" || command -v slurmlab > /dev/null || echo "missing: SMP_SLURMLAB=path/to/slurmlab"
	$(BIN)/python -m pytest -rs tests/launch/test_slurm.py

parity: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity.table

fuzz-parity: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity.fuzz --minutes $(or $(MINUTES),20) --seed $(or $(SEED),0) --page

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/run.py

bench-cpu: $(READY)
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/kernels.py --device cpu --rounds 10
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/step_profile.py --device cpu
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/blocks.py --device cpu --repeats 1
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/moe.py --device cpu --repeats 1
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/training_table.py --device cpu

gpu: export PYTHONPATH = $(CURDIR)
gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch sees no CUDA device")'
	$(PYTHON) benchmarks/gpu.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only "$(ONLY)")

gpu-check: $(READY)
	$(BIN)/python benchmarks/gpu.py --check

gpu-multi: export PYTHONPATH = $(CURDIR)
gpu-multi:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.device_count() > 1 or sys.exit("make gpu-multi: torch sees no two CUDA devices")'
	$(PYTHON) -m pytest -m gpu -rs tests/gpu/test_parity.py

clean:
	rm -rf build dist *.egg-info demo .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
