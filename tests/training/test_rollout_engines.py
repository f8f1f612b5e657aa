"""Other programs' engines: they have the weights that train in every layout, and what they do not know is measured."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import ConfigError
from smp.generation import Request, Sampling, Stops
from smp.training.rollouts.engines.transformers_sampler import TransformersSampler
from smp.training.rollouts.engines.vllm_sampler import VllmSampler
from smp.training.texts.text_model import alone
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.training import vllm_stand_in
from tests.training.flag_runs import clean_process, proves
from tests.training.rl_lab import flags, write_inputs
from tests.training.test_reinforcement_runs import run
from tests.training.tuning_lab import together, tune_all

pytest.importorskip("transformers")
OTHER = "--objective grpo --rollout-engine transformers"
LAYOUTS = {
    "alone": (1, ""),
    "lora": (1, "--lora-rank 4"),
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp 2": (2, "--pipeline-model-parallel-size 2"),
    "shard 2, lora": (2, "--lora-rank 4"),
    "cp 2": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "shard 2 x tp 2": (4, "--tensor-model-parallel-size 2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    write_inputs(folder)
    return folder


def assert_no_mismatch(steps: list[dict[str, float]]) -> None:
    """Of fp32: the engine has the weights of each step, and the log-probabilities of what it drew."""
    for step in steps:
        assert 0 < step["engine difference, largest"] < 2e-5 and step["engine difference"] < 3e-6
        assert step["engine ratio"] == pytest.approx(1, abs=1e-5) and abs(step["engine KL"]) < 1e-6
        assert step["effective sample size"] == pytest.approx(1, abs=1e-5)
        assert step["importance weight"] == pytest.approx(1, abs=1e-5)


@proves("rollout_engine")
def test_the_engine_has_the_weights_of_every_layout(folder: Path) -> None:
    """Those that the run begins with, and those after a step."""
    for world in (1, 2, 4):
        names = [name for name, (processes, _) in LAYOUTS.items() if processes == world]
        lines = [flags(folder, f"{OTHER} --train-iters 2", LAYOUTS[name][1]) for name in names]
        ranks = run_distributed(tune_all, world, lines)
        for i, name in enumerate(names):
            found = together([rank[i] for rank in ranks])
            assert len(found["more"]) == 2, name
            assert_no_mismatch(found["more"])
            changed = [not torch.equal(x, found["initial"][n]) for n, x in found["final"].items()]
            assert any(changed), name


@pytest.mark.parametrize("kind", ["qwen2-moe", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_families_whose_tensors_lie_otherwise(kind: str, tmp_path: Path) -> None:
    """Experts, which transformers stacks, from two ranks of them, also with adapters of each."""
    write_inputs(tmp_path, kind)
    layouts = ["--tensor-model-parallel-size 2"]
    if kind == "qwen2-moe":
        adapters = "--lora-rank 2 --lora-target-modules value,*.experts.*"
        layouts = ["--expert-model-parallel-size 2", f"--expert-model-parallel-size 2 {adapters}"]
    ranks = run_distributed(tune_all, 2, [flags(tmp_path, OTHER, f"{layout} --train-iters 2") for layout in layouts])
    for i in range(len(layouts)):
        assert_no_mismatch(together([rank[i] for rank in ranks])["more"])


def test_what_differs_is_measured_and_corrected(folder: Path) -> None:
    """bf16: two programs round otherwise. Samples of older weights, which the correction takes for another policy."""
    ahead = f"{OTHER} --one-step-off-policy --lr 0.5"
    lines = [flags(folder, words) for words in (f"{OTHER} --bf16", ahead, f"{OTHER} --temperature 0.7 --top-k 0")]
    (found,) = run_distributed(tune_all, 1, lines)
    rounded, late, tempered = (one["more"] for one in found)
    assert 1e-5 < rounded[0]["engine difference"] < 0.05 and rounded[0]["effective sample size"] > 0.9
    assert late[1]["engine difference"] > 1e-3 and late[1]["effective sample size"] < 0.999
    assert late[1]["importance weight"] != 1.0
    assert_no_mismatch(tempered)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(folder: Path, tmp_path: Path) -> None:
    method, saved = f"{OTHER} --steps-per-generation 2", f"--save {tmp_path} --save-interval 3"
    lines = [flags(folder, method), flags(folder, method, saved, "--exit-interval 3")]
    (found,) = run_distributed(tune_all, 1, [*lines, flags(folder, method, saved, "--resume")])
    whole, first, second = found
    assert whole["losses"] == first["losses"] + second["losses"] and len(second["losses"]) == 1
    assert all(torch.equal(tensor, second["final"][n]) for n, tensor in whole["final"].items())


def with_stand_in(rank: int, world: int, folder: str, lines: list[str]) -> tuple[list[Any], list[Any], list[int]]:
    sys.path.insert(0, folder)
    found = tune_all(rank, world, lines)
    import vllm  # type: ignore[import-not-found]

    return found, vllm.made, vllm.PER_CALL


@proves("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
def test_the_adapter_of_vllm_by_a_stand_in(folder: Path, tmp_path: Path) -> None:
    """Names of tensors, log-probabilities of both modes, the division of prompts. vLLM itself was not."""
    shutil.copyfile(Path(__file__).parent / "vllm_stand_in.py", tmp_path / "vllm.py")
    method = "--objective grpo --rollout-engine vllm"
    lines = [flags(folder, method, "--train-iters 2"), flags(folder, method, "--train-iters 2 --temperature 0.7")]
    lines.append(
        flags(folder, method, "--vllm-gpu-memory-utilization 0.5 --vllm-tensor-parallel-size 2 --train-iters 1")
    )
    ranks = run_distributed(with_stand_in, 2, str(tmp_path), lines)
    for i in range(len(lines)):
        assert_no_mismatch(together([rank[0][i] for rank in ranks])["more"])
    of_rank = ranks[0][1]
    assert [made["mode"] for made in of_rank] == ["raw_logprobs", "processed_logprobs", "raw_logprobs"]
    assert [(made["memory"], made["ranks"]) for made in of_rank] == [(0.3, 1), (0.3, 1), (0.5, 2)]
    # Eight completions of two prompts: each process writes one prompt's, or both write all together.
    assert ranks[0][2] == [4, 4, 4, 4, 8]


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """``import vllm`` is the stand-in, in this process."""
    monkeypatch.setitem(sys.modules, "vllm", vllm_stand_in)


def test_vllm_starts_without_a_launcher_and_must_drop_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    content = json.loads((folder / "config.json").read_text())
    sizes: dict[str, Any] = {"longest": 48, "batch_size": 2, "memory": 0.3, "tensor_parallel": 1, "seed": 1}
    with alone(torch.device("cpu")):
        sampler = VllmSampler(content, torch.float32, temperature=1.0, **sizes)
        assert not any(name in os.environ for name in names)
        monkeypatch.setenv("RANK", "0")
        VllmSampler(content, torch.float32, temperature=1.0, **sizes)
        assert os.environ["RANK"] == "0"
    sampler.load(iter([]))
    monkeypatch.setattr(vllm_stand_in.LLM, "reset_prefix_cache", lambda self: False)
    with pytest.raises(RuntimeError, match="keys of older weights"):
        sampler.load(iter([]))


def test_vllm_needs_processes_that_it_divides_and_no_experts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    method = "--objective grpo --rollout-engine vllm"
    words = flags(folder, method, "--vllm-tensor-parallel-size 2 --dry-run").split()
    read_finetune_settings(words, 4)
    with pytest.raises(ConfigError, match="size 2 does not divide the 3 processes of this run"):
        read_finetune_settings(words, 3)
    write_inputs(tmp_path, "qwen2-moe")
    with pytest.raises(ConfigError, match="^--rollout-engine vllm: models with experts are refused: vLLM rearranges"):
        read_finetune_settings(flags(tmp_path, method).split(), 1)


REFUSED = {
    "--rollout-engine vllm --inprocess-restart --peer-snapshot-interval 1": "vllm and --inprocess-restart exclude",
    "--rollout-engine vllm": "--rollout-engine vllm: vllm is not installed: pip install vllm",
    "--rollout-engine transformers --lora-rank 2 --load-in-4bit": "weights in 4 bits are not sent to another engine",
    "--rollout-engine transformers --model-implementation transformers": "--rollout-engine transformers: only this",
    "--rollout-engine transformers --vllm-tensor-parallel-size 2": "--vllm-tensor-parallel-size 2 has no effect",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(folder: Path, given: str, capfd: pytest.CaptureFixture[str]) -> None:
    with clean_process():
        assert run(flags(folder, f"--objective grpo {given}")) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert len(said) == 1 and REFUSED[given] in said[0], said


def test_log_probabilities_are_of_the_whole_soft_max(folder: Path) -> None:
    """Also where sampling is cut, of prompts of unequal lengths and of texts that went on before."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    content = json.loads((folder / "config.json").read_text())
    sampler = TransformersSampler(content, torch.float32, torch.device("cpu"), batch_size=2)
    sampler.load(iter(model.state_dict().items()))
    requests = [Request([5, 6, 7], 6, 0), Request([9], 6, 1), Request([8, 4], 6, 2, 0, (11, 12))]
    texts = sampler.sample(requests, Sampling(0.8, top_k=5, top_p=0.9, seed=3), Stops(frozenset({2})))
    assert {text.request.index for text in texts} == {0, 1, 2}
    for text in texts:
        written = len(text.request.written)
        ids = torch.tensor([[*text.request.prompt, *text.ids]])
        with torch.no_grad():
            whole = (model(ids).logits[0].float() / 0.8).log_softmax(-1)
        first = len(text.request.prompt) + written
        want = [whole[first + i - 1, token].item() for i, token in enumerate(text.ids[written:])]
        assert text.log_probs == pytest.approx(want, abs=1e-5)
        assert tuple(text.ids[:written]) == tuple(text.request.written)
        assert len(text.ids) == 6 if text.finish == "length" else text.ids[-1] == 2
    assert sampler.sample(requests, Sampling(0.8, top_k=5, top_p=0.9, seed=3), Stops(frozenset({2}))) == texts
