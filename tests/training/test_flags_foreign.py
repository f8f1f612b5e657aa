"""--model-implementation and --model-config: which implementation trains, and what architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_program
from tests.training.any_model_lab import write_type
from tests.training.flag_runs import proves

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
RUN = "--mock-data --seq-length 16 --train-iters 2 --global-batch-size 2 --no-tensorboard --no-progress-bar"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("types")
    # without the row of padding, which transformers never trains
    return {kind: write_type(root / kind, kind, pad_token_id=None) for kind in ("helium", "llama")}


def pretrain(folder: Path, words: str) -> tuple[int, str, str]:
    done = run_program(ROOT / "pretrain_gpt.py", f"{RUN} --log-interval 1 {words}".split(), folder)
    return done.returncode, done.stdout, done.stderr


def losses(out: str) -> list[str]:
    return [line.split("lm loss: ")[1].split(" ")[0] for line in out.splitlines() if "lm loss: " in line]


@proves("model_implementation")
def test_which_implementation_computes_is_chosen_and_said(folders: dict[str, Path], tmp_path: Path) -> None:
    helium, llama = (f"--load {folders[kind]}" for kind in ("helium", "llama"))
    said = {}
    for words in (helium, llama, f"{llama} --model-implementation smp", f"{llama} --model-implementation transformers"):
        code, out, err = pretrain(tmp_path, words)
        assert code == 0, err
        said[words] = ("helium as" in out, "llama as transformers computes it" in out), losses(out)
    foreign = [which for which, _ in said.values()]
    assert foreign == [(True, False), (False, False), (False, False), (False, True)]
    ours, theirs = (said[f"{llama} --model-implementation {name}"][1] for name in ("smp", "transformers"))
    assert said[llama][1] == ours and [float(x) for x in theirs] == pytest.approx([float(x) for x in ours], rel=1e-5)
    code, _, err = pretrain(tmp_path, f"{helium} --model-implementation smp")
    assert code == 2 and "helium" in err.lower() and "is not supported" in err
    code, _, err = pretrain(tmp_path, "--model debug --vocab-size 100 --model-implementation transformers")
    assert code == 2 and "give --model-config or the --load of a Hugging Face folder" in err


@proves("model_config")
def test_an_architecture_is_trained_from_random_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("helium", "llama"):
        config, save = folders[kind] / "config.json", tmp_path / kind
        code, out, err = pretrain(tmp_path, f"--model-config {config} --save {save}")
        assert code == 0, err
        assert ("helium as transformers computes it" in out) == (kind == "helium") and len(losses(out)) == 2
        again = pretrain(tmp_path, f"--model-config {config} --save {save} --load auto --train-iters 3")
        assert again[0] == 0 and "at iteration 2" in again[1]
    code, _, err = pretrain(tmp_path, f"--model debug --model-config {config}")
    assert code == 2 and "--model debug and --model-config" in err
    code, _, err = pretrain(tmp_path, f"--model-config {folders['helium']}/config.json --num-layers 7")
    assert code == 2 and "--num-layers: the architecture is that of config.json" in err
    code, _, err = pretrain(tmp_path, f"--model-config {tmp_path}/nowhere.json")
    assert code == 2 and "cannot be read" in err


def test_a_dry_run_measures_a_step_of_transformers_module_too(folders: dict[str, Path], tmp_path: Path) -> None:
    code, out, err = pretrain(tmp_path, f"--model-config {folders['helium']} --dry-run --bf16")
    assert code == 0, err
    assert "# memory of each rank, in a step of a GPU that was run on tensors without data:" in out
    assert "# parameters: 37,792 (vocabulary and positions 19,232, 2 blocks of 9,280)" in out
