"""Models that transformers computes train as in a plain loop of transformers, packed or not, in every layout."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from smp.config import ConfigError
from smp.generation import Generator, Request, Sampling
from smp.models.scoring import token_scores
from smp.parallel.dtensor_region import local_part
from smp.training.settings import read_settings
from smp.training.texts.text_model import alone, load_model, open_model
from smp.training.tuning import model as tuning_model
from smp.training.tuning import settings
from smp.training.tuning.settings import read_finetune_settings
from tests.distributed import run_distributed
from tests.hf.live_memory import Live
from tests.parity.result import TOLERANCE, tensor_errors
from tests.programs import run_program
from tests.training.any_model_lab import LR, largest_error, load, plain_loop, train_plainly, tune_types, write_type
from tests.training.distill_lab import divergence
from tests.training.rl_lab import flags as rl_flags
from tests.training.rl_lab import write_inputs
from tests.training.tuning_lab import together, tune_all
from tools.convert_checkpoint import main as convert
from tools.generate import main as generate

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
TYPES = ("helium", "qwen3_next", "gemma2", "deepseek_v3")
"""Dense; gated delta net and experts; windows and caps of scores and logits, a family of ours too; latent attention."""
STEPS = f"--seq-length 48 --micro-batch-size 2 --global-batch-size 8 --lr {LR} --optimizer sgd --weight-decay 0"
COMMON = f"{STEPS} --train-iters 3 --model-implementation transformers"
LN_2 = 0.6931472
LAYOUTS = {
    "alone": (1, ""),
    "recompute": (1, "--recompute-granularity full"),
    "shard 2": (2, ""),
    "replicas 2": (2, "--hybrid-shard-degree 1 --recompute-granularity selective"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "shard 2 x tp 2": (4, "--tensor-model-parallel-size 2"),
}
CASES = {layout: [(kind, pack) for kind in TYPES for pack in ("off", "best-fit")] for layout in LAYOUTS}
FAST = {
    "alone": CASES["alone"],
    "recompute": [("helium", "best-fit"), ("qwen3_next", "off")],
    "shard 2": [("gemma2", "off"), ("deepseek_v3", "best-fit")],
    "replicas 2": [("helium", "off")],
    "tp 2": [("helium", "best-fit"), ("deepseek_v3", "off")],
    "tp 2 + sp": [("helium", "off"), ("qwen3_next", "off"), ("gemma2", "best-fit"), ("deepseek_v3", "best-fit")],
    "shard 2 x tp 2": [("qwen3_next", "off"), ("gemma2", "best-fit")],
}
"""Every type in one process and cut by tensor and sequence parallelism, every layout with one type at least."""
SLOW = {
    layout: [case for case in CASES[layout] if layout == "alone" or case not in fast] for layout, fast in FAST.items()
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("types")
    return {kind: write_type(root / kind, kind) for kind in (*TYPES, "llama")}


Runs = dict[tuple[str, str, str], dict[str, Any]]


@pytest.fixture(scope="module", params=[FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["fast", "slow"])
def runs(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Runs:
    out: Runs = {}
    for world in (1, 2, 4):
        here = [layout for layout, (processes, _) in LAYOUTS.items() if processes == world]
        cases = [(layout, kind, pack) for layout in here for kind, pack in request.param[layout]]
        flags = [flags_of(folders[kind], f"{LAYOUTS[layout][1]} --packing {pack}") for layout, kind, pack in cases]
        ranks = run_distributed(tune_types, world, flags)
        for i, case in enumerate(cases):
            every = [r[i] for r in ranks]
            out[case] = every[0] if "refused" in every[0] else together(every)
    return out


def flags_of(folder: Path, more: str) -> str:
    return f"--load {folder} --data-path {folder}/sft.jsonl --log-dir {folder}/logs {COMMON} {more}"


@pytest.mark.parametrize("pack", ["off", "best-fit"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_run_equals_a_plain_loop_of_transformers(runs: Runs, folders: dict[str, Path], kind: str, pack: str) -> None:
    alone = runs["alone", kind, pack]
    if kind == "qwen3_next" and pack == "best-fit":
        assert "GatedDeltaNet, which carries over from one document to the next" in alone["refused"]
        return
    want = plain_loop(folders[kind], alone["batches"])
    assert len(set(want["losses"])) == 3
    for layout in [layout for layout, *case in runs if case == [kind, pack]]:
        errors = largest_error(runs[layout, kind, pack], want)
        assert max(errors.values()) <= TOLERANCE, (layout, errors)


EXPERTS = {
    2: ("--expert-model-parallel-size 2", "--expert-model-parallel-size 2 --recompute-granularity full"),
    4: (
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2",
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        "--expert-model-parallel-size 2 --hybrid-shard-degree 2",
    ),
}


def test_experts_are_spread_over_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    """And a checkpoint of them goes on where every rank has all."""
    folder = folders["qwen3_next"]
    [alone] = run_distributed(tune_types, 1, [flags_of(folder, "--packing off")])[0]
    want, saved = plain_loop(folder, alone["batches"]), f"--save {tmp_path}/saved"
    for world, words in EXPERTS.items():
        flags = [flags_of(folder, f"--packing off {more}") for more in words]
        if world == 2:
            flags.append(flags_of(folder, f"--packing off {words[0]} {saved} --exit-interval 2"))
        ranks = run_distributed(tune_types, world, flags)
        for i, more in enumerate(words):
            errors = largest_error(together([r[i] for r in ranks]), want)
            assert max(errors.values()) <= TOLERANCE, (more, errors)
    [rest] = run_distributed(tune_types, 1, [flags_of(folder, f"--packing off {saved} --resume")])[0]
    assert rest["losses"] == pytest.approx(want["losses"][2:], rel=TOLERANCE)
    [none] = run_distributed(tune_types, 2, [flags_of(folders["helium"], f"--packing off {EXPERTS[2][0]}")])[0]
    assert "has no experts that could be cut" in none["refused"]


def test_both_implementations_of_a_family_give_the_same_losses(folders: dict[str, Path]) -> None:
    flags = flags_of(folders["llama"], "")
    muon = flags.replace("--optimizer sgd", "--optimizer muon").replace(f"--lr {LR}", "--lr 0.001")
    both = [of.replace(" transformers", which) for of in (flags, muon) for which in (" smp", " transformers")]
    ours, theirs, *of_muon = run_distributed(tune_types, 1, both)[0]
    assert len(set(ours["losses"])) == 3
    for key in ("losses", "norms"):
        assert theirs[key] == pytest.approx(ours[key], rel=TOLERANCE)
        assert of_muon[1][key] == pytest.approx(of_muon[0][key], rel=TOLERANCE), "it leaves out the same matrices"
    assert "layers.0.attention.query.weight" in ours["initial"]
    assert "model.layers.0.self_attn.q_proj.weight" in theirs["initial"]


def test_pairs_and_labelled_answers_have_the_same_losses_too(folders: dict[str, Path]) -> None:
    """Of both implementations: loss and gradient come by the same seam of answers."""
    folder = folders["llama"]
    common = f"--load {folder} --log-dir {folder}/logs {STEPS} --train-iters 2 --model-implementation"
    lora = "dpo.jsonl --objective dpo --lora-rank 2 --lora-target-modules"
    of = {"dpo": "dpo.jsonl --objective dpo", "orpo": "dpo.jsonl --objective orpo", "kto": "kto.jsonl --objective kto"}
    flags = [f"{common} {i} --data-path {folder}/{words}" for words in of.values() for i in ("smp", "transformers")]
    adapted = [f"{common} transformers --data-path {folder}/{lora} {words}" for words in ("q_proj", "all-linear")]
    *results, some, every = run_distributed(tune_types, 1, [*flags, *adapted])[0]
    assert some["losses"][0] == every["losses"][0] == pytest.approx(LN_2) and some["losses"][1] != every["losses"][1]
    assert {name.split(".")[-3] for name in some["initial"]} == {"q_proj"}
    for name, ours, theirs in zip(of, results[::2], results[1::2], strict=True):
        assert len(set(ours["losses"])) == 2
        for key in ("losses", "norms"):
            assert theirs[key] == pytest.approx(ours[key], rel=TOLERANCE), name


def test_distillation_between_implementations(folders: dict[str, Path]) -> None:
    """A student of either, a teacher of transformers' own with no tokens to fill up, beside the formula in fp64."""
    student, teacher = folders["llama"], folders["helium"]
    common = f"--load {student} --log-dir {student}/logs --data-path {student}/sft.jsonl {STEPS} --packing off"
    common += (
        f" --train-iters 2 --objective distill --lr 0.001 --temperature 0.05 --teacher {teacher} --model-implementation"
    )
    layouts = {1: ("",), 2: ("--tensor-model-parallel-size 2 --sequence-parallel", "")}
    results = []
    for world, several in layouts.items():
        flags = [f"{common} {which} {layout}" for which in ("smp", "transformers") for layout in several]
        ranks = run_distributed(tune_types, world, flags)
        results += [together([r[i] for r in ranks]) for i in range(len(flags))]
    for result in results:
        assert result["losses"] == pytest.approx(results[0]["losses"], rel=TOLERANCE)
        assert result["norms"] == pytest.approx(results[0]["norms"], rel=TOLERANCE)
    every = f"{common} transformers --train-iters 1 --global-batch-size 60 --split 100,0,0"
    written = [f"{common} {which} --lmbda 1 --max-completion-length 8" for which in ("smp", "transformers")]
    of_all, ours, theirs = run_distributed(tune_types, 1, [every, *written])[0]
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=TOLERANCE), "on texts that the student wrote"
    assert ours["losses"] != pytest.approx(results[0]["losses"], rel=TOLERANCE)
    assert of_all["losses"][0] == pytest.approx(divergence(student, teacher, 0.5, 0.05)[0], rel=TOLERANCE)


RL = {1: ("smp", "transformers"), 2: ("transformers --tensor-model-parallel-size 2", "transformers")}


def test_reinforcement_learning_of_both_implementations(tmp_path: Path) -> None:
    """The same draws of the same logits: the same texts, rewards, losses and weights, in every layout. What
    transformers keeps of a hybrid's texts is of texts that end at different lengths."""
    llama, hybrid = tmp_path / "llama", tmp_path / "hybrid"
    write_inputs(llama)
    write_inputs(hybrid)
    write_type(hybrid, "qwen3_next")
    method, found, mixed = "--objective grpo --beta 0.05 --steps-per-generation 2 --num-iterations 2", [], []
    for world, words in RL.items():
        sp = "--sequence-parallel" if world == 2 else ""
        lines = [
            rl_flags(llama, method, f"--model-implementation {which} {sp if 'tensor' in which else ''}")
            for which in words
        ]
        more = ("transformers --expert-model-parallel-size 2",) if world == 2 else ()
        lines += [
            rl_flags(hybrid, "--objective rloo", f"--model-implementation {which}")
            for which in (*words, *more)
            if which != "smp"
        ]
        ranks = run_distributed(tune_all, world, lines)
        results = [together([rank[i] for rank in ranks]) for i in range(len(lines))]
        found, mixed = found + results[: len(words)], mixed + results[len(words) :]
    ours, *theirs = found
    assert len(set(ours["losses"])) == 4 and mixed[0]["more"][0]["sampling difference"] < 1e-5
    for result, wanted, first in [*((r, ours, theirs[0]) for r in theirs), *((r, mixed[0], mixed[0]) for r in mixed)]:
        assert result["norms"] == pytest.approx(wanted["norms"], rel=TOLERANCE)
        for step, same in zip(result["more"], wanted["more"], strict=True):
            assert step["reward"] == pytest.approx(same["reward"], rel=TOLERANCE, abs=1e-6)
            assert step["completion length"] == same["completion length"]
            assert step["sampling difference"] == pytest.approx(same["sampling difference"], abs=1e-5)
        assert max(tensor_errors(result["final"], first["final"], first["initial"]).values()) <= TOLERANCE


PEFT = {
    ".lora.a": ".lora_A.default.weight",
    ".lora.b": ".lora_B.default.weight",
    ".lora.magnitude": ".lora_magnitude_vector.default.weight",
}
LORA = {
    "alone": (1, ""),
    "shard 2, bf16": (2, "--bf16"),
    "tp 2": (2, "--tensor-model-parallel-size 2"),
    "tp 2 + sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full"),
}


def move_biases(folder: Path) -> None:
    """Off 0, which they start as."""
    model = load(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
    model.save_pretrained(folder)


def test_adapters_equal_those_of_peft_in_every_layout(folders: dict[str, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    # peft takes the dense layers of models with experts for experts
    kinds, done = {"helium": "all-linear", "deepseek_v3": "*self_attn*"}, {}
    # with biases, and one head of keys for two ranks; with columns that all ranks get (q_a_proj)
    kinds |= {"qwen2-dora": "all-linear", "deepseek_v3-dora": "q_a_proj,q_b_proj,kv_b_proj,o_proj"}
    folders = folders | {
        "qwen2-dora": write_type(tmp_path / "qwen2", "qwen2", num_key_value_heads=1, pad_token_id=None),
        "deepseek_v3-dora": folders["deepseek_v3"],
        "latent": write_type(tmp_path / "latent", "deepseek_v2"),
    }
    move_biases(folders["qwen2-dora"])
    for layout, (world, words) in LORA.items():
        save = {kind: f"--save {tmp_path}/{kind}" if layout == "alone" else "" for kind in kinds}
        more = f"--packing off --lora-rank 4 --lr 0.1 {words} --lora-target-modules"
        flags = [
            flags_of(folders[k], f"{more} {which} {save[k]} {'--use-dora' if 'dora' in k else ''}")
            for k, which in kinds.items()
        ]
        latent = [flags_of(folders["latent"], f"{more} kv_a_proj_with_mqa --use-dora")] if layout == "tp 2" else []
        ranks = run_distributed(tune_types, world, [*flags, *latent])
        if latent:
            assert "which takes no adapter with --use-dora; leave it out" in ranks[0][-1]["refused"]
        done |= {(layout, kind): together([r[i] for r in ranks]) for i, kind in enumerate(kinds)}
    for kind in kinds:
        alone = done["alone", kind]
        model = peft.PeftModel.from_pretrained(load(folders[kind]), tmp_path / kind / "adapter", is_trainable=True)
        factors = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters()}
        for name, tensor in alone["final"].items():
            factor = factors[re.sub(r"\.lora\.\w+$", lambda of: PEFT[of[0]], name)]
            assert torch.equal(factor, tensor), "the folder in peft's format"
            factor.data.copy_(alone["initial"][name])
        want = train_plainly(model.train(), alone["batches"], 0.1)
        assert len(want["final"]) == len(alone["final"])
        for layout in LORA:
            near = 1e-2 if "bf16" in layout else TOLERANCE
            for key in ("losses", "norms"):
                assert done[layout, kind][key] == pytest.approx(want[key], rel=near), (layout, kind)


def run(folder: Path, words: str, processes: int = 1, program: str = "finetune.py") -> str:
    common = f"--log-dir {folder}/logs --no-tensorboard --no-progress-bar --log-interval 1"
    done = run_program(ROOT / program, f"{words} {common}".split(), folder, processes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def texts(capsys: pytest.CaptureFixture[str], folder: Path) -> list[str]:
    """That tools/generate.py writes, without anything else on its output."""
    capsys.readouterr()
    words = ["--load", str(folder), "--prompt", "it is", "--num-samples", "3", "--max-new-tokens", "5"]
    assert generate(words) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


def test_texts_are_scored_and_written_as_transformers_does(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also of a type that keeps its texts in a way of its own (MiniMax), which are computed whole for every token."""
    ids = [5, 6, 7, 8, 40, 41, 9, 250, 3]
    with alone(torch.device("cpu")):
        for folder in (folders["helium"], write_type(tmp_path, "minimax")):
            model, theirs = load_model(open_model(folder), torch.device("cpu")), load(folder).eval()
            with torch.no_grad():
                wanted = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].double().log_softmax(-1)
            found, _ = token_scores(model, ids, 16, 8)
            assert torch.allclose(found, wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-5)
            asked = [Request(ids[:n], 6, n) for n in (3, 9, 3, 5)]
            for text in Generator(model, batch_size=3).write(asked, Sampling(temperature=0)):
                start = torch.tensor([text.request.prompt])
                best = theirs.generate(start, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
                assert text.ids == best[0, start.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_a_run_goes_on_in_another_layout_and_ends_as_a_folder_of_transformers(
    folders: dict[str, Path], tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = flags_of(folders[kind], "--packing off")
    whole = run(tmp_path, f"{argv} --save {tmp_path}/whole --save-hf")
    [said] = re.findall("^smp.transform: .*", whole, re.M)
    assert "nothing is cut" in said
    run(tmp_path, f"{argv} --save {tmp_path}/same --exit-interval 2")
    run(tmp_path, f"{argv} --save {tmp_path}/same --resume --save-hf --async-save")
    run(tmp_path, f"{argv} --save {tmp_path}/other --exit-interval 2 --tensor-model-parallel-size 2", 2)
    out = run(tmp_path, f"{argv} --save {tmp_path}/other --resume --save-hf", 2)
    assert "at iteration 2" in out
    want = weights(tmp_path / "whole/hf_model")
    same, other = weights(tmp_path / "same/hf_model"), weights(tmp_path / "other/hf_model")
    assert want.keys() == weights(folders[kind]).keys()
    assert all(torch.equal(same[name], tensor) for name, tensor in want.items())
    for name, tensor in want.items():
        assert (other[name] - tensor).norm() <= TOLERANCE * tensor.norm().clamp(min=1e-3), name
    assert convert(["--load", f"{tmp_path}/whole", "--save", f"{tmp_path}/converted"]) == 0
    converted = weights(tmp_path / "converted")
    assert all(torch.equal(converted[name], tensor) for name, tensor in want.items())
    assert texts(capsys, tmp_path / "whole") == texts(capsys, tmp_path / "whole/hf_model") != []
    names = {path.name for path in (tmp_path / "whole/hf_model").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def loading(rank: int, world_size: int, runs: list[str]) -> list[tuple[int, int, int]]:
    """Of each run: bytes at most while its model, which has no memory before, is filled; those of its parts of it; and
    those of its largest tensor."""
    found, live, plain = list[tuple[int, int, int]](), list[Live](), tuning_model.parallelize

    def watched(model: Any, *args: Any, **options: Any) -> Any:
        out = plain(model, *args, **options)
        assert all(p.is_meta for p in model.parameters())
        live.append(Live())
        live[-1].__enter__()
        return out

    def end(fill: Any, model: Any, *args: Any) -> Any:
        out = fill(model, *args)
        live[-1].__exit__(None, None, None)
        own = sum(local_part(p).nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
        found.append((live[-1].peak, own, max(p.nbytes for p in model.parameters())))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_model, "parallelize", watched)
        patch.setattr(tuning_model, "_fill_foreign", partial(end, tuning_model._fill_foreign))
        results = tune_types(rank, world_size, runs)
    assert not any("refused" in result for result in results), results
    return found


def test_no_rank_holds_more_than_its_parts_and_one_tensor_while_a_folder_is_read(folders: dict[str, Path]) -> None:
    """On four ranks, cut in every way: dense, and experts that the folder has one by one."""
    layouts = ("", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4")
    cases = [(kind, words) for kind in ("helium", "deepseek_v3") for words in layouts]
    flags = [flags_of(folders[kind], f"--packing off {words} --train-iters 1") for kind, words in cases]
    for results in run_distributed(loading, 4, flags):
        for case, (peak, own, tensor) in zip(cases, results, strict=True):
            assert own <= peak <= own + tensor, (case, peak, own, tensor)


REFUSED = {
    "--context-parallel-size 2": "--context-parallel-size 2: only this project's decoder has it",
    "--fp8-format hybrid": "--fp8-format hybrid: only this project's decoder has it",
    "--attention-backend math": "--attention-backend math: only this project's decoder has it",
    "--expert-tensor-parallel-size 1": "--expert-tensor-parallel-size 1: only this project's decoder has it",
    "--window-size 4": "--window-size: the architecture is that of config.json",
}


def test_documents_that_a_type_cannot_keep_apart_are_refused_before_data_are_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a dry run and a preview, too, where fine-tuning packs by itself."""
    said = "--packing best-fit .*GatedDeltaNet, which carries over from one document to the next; give --packing off"
    load, common = f"--load {folders['qwen3_next']} --model-implementation transformers", "--micro-batch-size 1"
    monkeypatch.setattr(settings, "read_data", lambda *_: pytest.fail("data were read"))
    for words in ("--dry-run", f"--data-path {folders['qwen3_next']}/sft.jsonl --preview 2"):
        with pytest.raises(ConfigError, match=said):
            read_finetune_settings(f"{load} {common} --seq-length 48 --global-batch-size 2 {words}".split(), 1)
    both = "--reset-attention-mask --reset-position-ids"
    with pytest.raises(ConfigError, match=said):
        read_settings(f"{load} {common} --dry-run {both}".split(), {}, 1)
    assert read_settings(f"{load} {common} --dry-run".split(), {}, 1).model.is_foreign


def test_what_only_the_decoder_has_is_refused_by_name(folders: dict[str, Path]) -> None:
    for words, said in REFUSED.items():
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_finetune_settings(flags_of(folders["helium"], words).split(), 2)
