"""tools/plan.py beyond the ranking: networks, costs, failures, changes, curves, files of measured devices."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from smp.config import Layout, load_config, resolve
from smp.models.presets import PRESETS
from smp.planner.devices import DEVICES, ShareErrors
from smp.planner.outlook import Outlook
from smp.planner.published.errors import PAGE
from smp.planner.scaling import sizes
from smp.planner.search import candidates
from smp.planner.seconds import StepTime
from smp.planner.show import mfu
from smp.planner.step_time import StepModel
from smp.planner.uncertainty import relative_error, told_apart
from tools.plan import EXPERTS_IN_BF16, asked_for, device_of, main, read_arguments

SMALL = "--model llama3.2-1b --seq-length 2048 --pipeline-model-parallel-size 1 --micro-batch-size 1"
QUICK = f"{SMALL} --recompute-granularity none --data-parallel-sharding-strategy optim_grads_params"
NONE = StepTime(**dict.fromkeys(StepTime.__dataclass_fields__, 0.0))


def said(flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    code = main(flags.split() if isinstance(flags, str) else flags)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_what_a_run_takes_and_what_a_change_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*f"--gpus 8 --gpu h100 {QUICK} --top 2 --tokens 1e12 --gpu-hour-price 2.5 --watts 1000".split()]
    flags += ["--what-if", "--recompute-granularity full", *["--mtbf-hours", "100", "--save-seconds", "2"]]
    flags += ["--recovery-seconds", "300", "--spares", "1", "--repair-hours", "10", "--step-spread-percent", "1"]
    assert main(flags) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("1e+12 tokens")]
    words = line.replace(",", "").split()
    days, hours, price, energy = (float(words[i]) for i in (6, 8, 14, 15))
    assert hours == pytest.approx(days * 24 * 8, rel=0.01) and price == pytest.approx(2.5 * hours, rel=0.01)
    assert energy == pytest.approx(hours * 1000 / 1e6, abs=0.06)
    assert "waiting 1.4 %" in out and "repair 0.5 %" in out
    assert "With --recompute-granularity full:" in out and "matrix products: +" in out and "memory " in out
    assert "±" in out and "cannot be told apart" in out


def test_a_change_of_the_network_and_one_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    base = f"--gpus 64 --gpu h100 {QUICK} --tensor-model-parallel-size 1 --hybrid-shard-degree 0 --top 1".split()
    assert main([*base, "--what-if", "--node-bandwidth 1"]) == 0
    assert "gathers of weights and reductions of gradients: +" in capsys.readouterr().out
    assert main([*base, "--what-if", "--expert-model-parallel-size 7"]) == 0
    assert "--expert-model-parallel-size 7" in capsys.readouterr().out.split("With ")[-1]


def test_days_of_a_run_that_never_gets_on() -> None:
    never = Outlook.of(1e12, 1e6, 8, 0.0, price=1.0, watts=None)
    assert never.days == float("inf") and never.megawatt_hours is None
    assert str(Outlook.of(86400e6, 1e6, 8, 0.5, price=None, watts=None)) == "2.0 days, 384 GPU hours"


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--nvlink-domain 72", "connected", 72),
        ("--leaf-gpus 256", "leaf", 256),
        ("--leaf-gpus 256 --oversubscription 3", "oversubscription", 3.0),
        ("--leaf-gpus 256 --contention 2", "contention", 2.0),
        ("--gpus-per-node 4", "connected", 4),
        ("--node-bandwidth 12.5", "node_link", 12.5e9),
        ("--tokens 1 --watts 900", "watts", 900.0),
    ],
)
def test_what_the_user_knows_of_the_cluster_is_taken(flags: str, field: str, value: float) -> None:
    given, _ = read_arguments([*["--gpus", "64", "--gpu", "b200"], *flags.split()])
    assert getattr(device_of(given), field) == value


def test_a_rack_stays_connected_whatever_its_nodes_are() -> None:
    """Also where the number of GPUs per node is given as it is by default."""
    for kind, each, connected in (("gb200", 4, 72), ("gb200", 2, 72), ("b200", 8, 8), ("h100", 4, 4)):
        given, _ = read_arguments(["--gpus", "72", "--gpu", kind, "--gpus-per-node", str(each)])
        assert device_of(given).connected == connected, kind
    given, _ = read_arguments(["--gpus", "72", "--gpu", "gb200", "--gpus-per-node", "8", "--nvlink-domain", "8"])
    assert device_of(given).connected == 8


def test_utilization_is_of_the_peak_in_the_precision_of_the_run() -> None:
    """Products in fp32 take half of bf16's peak: a device that reaches all of that is used fully in either."""
    # So slow that products are all of a step.
    device = replace(DEVICES["h100"], peak=1e9, product_share=1.0, attention_share=1.0, tiles=1)
    decided = {"tensor_model_parallel_size", "recompute_granularity", "micro_batch_size"}
    used = []
    for flags in (f"{SMALL} --bf16", f"{SMALL} --no-bf16"):
        (found,) = candidates(asked_for(f"{flags} --seq-length 256".split(), 1), 1, device, decided)
        used.append(mfu(found, device))
    assert used[0] == pytest.approx(used[1], rel=1e-3) and 0.9 < used[0] <= 1


def test_a_narrow_spine_slows_what_crosses_it_and_a_large_domain_what_does_not_fit_a_node() -> None:
    flags = "--model llama3-8b --tensor-model-parallel-size 8 --sequence-parallel --global-batch-size 128 --mock-data"
    resolved = resolve(load_config([*flags.split(), "--bf16", "--dry-run"], PRESETS), 512)
    layout, device = Layout.from_config(resolved.parallel, 512), DEVICES["h100"]
    slow = replace(device, leaf=8, oversubscription=8.0, contention=2.0)
    parts = [StepModel(resolved, layout, one).predict() for one in (device, slow, replace(device, domain=512))]
    assert parts[0].data < parts[1].data and parts[2].data < parts[0].data
    assert parts[0].tensor == parts[1].tensor


def test_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--gpus 32 --gpu h100 {QUICK} --tensor-model-parallel-size 1 --global-batch-size 32 --scaling weak strong"
    files = {"--csv": tmp_path / "curve.csv", "--curve": tmp_path / "curve.png"}
    assert main([*flags.split(), *(str(word) for pair in files.items() for word in pair)]) == 0
    rows = list(csv.DictReader(files["--csv"].open()))
    assert [(row["scaling"], row["gpus"]) for row in rows] == [
        ("weak", "8"), ("weak", "32"), ("strong", "8"), ("strong", "32")
    ]  # fmt: skip
    assert [row["global_batch_size"] for row in rows] == ["8", "32", "32", "32"]
    assert all(row["efficiency"] == "1.0000" for row in rows[::2]) and float(rows[3]["efficiency"]) < 1
    assert files["--curve"].stat().st_size > 1000
    assert sizes(100_000, 8) == [8, 32, 128, 512, 2048, 8192, 32768, 100_000] and sizes(4, 8) == [4]


def test_a_measured_device_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.yaml"
    assert "products" in said(f"--gpus 1 --gpu cpu --measure {path}", capsys)
    text = path.read_text()
    assert "product_share: 1.0" in text and "errors:" in text
    sizes_ = "--vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
    out = said(f"--gpus 1 --gpu {path} {sizes_} --global-batch-size 4 --top 1", capsys)
    assert "layouts fit" in out and "±" in out
    out = said(f"--gpus 1 --gpu {path} {sizes_} --global-batch-size 4 --top 1 --tokens 1e6", capsys)
    assert "MWh" not in out and "failures cost nothing here: say how many with --mtbf-hours" in out
    for wrong in ("peak: fast\n", re.sub("peak: .*", "peak: 0", text, count=1)):
        path.write_text(wrong)
        assert main(f"--gpus 1 --gpu {path} {sizes_}".split()) == 2
        assert "is no file that --measure wrote" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "mine.yaml"
    assert main(f"--gpus 1 --gpu h100 --measure {path}".split()) == 2 and not path.exists()
    assert "this machine has no GPU to measure as h100" in capsys.readouterr().err


def test_a_weak_curve_starts_where_the_batch_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--gpus 512 --gpu h100 {QUICK} --tensor-model-parallel-size 8 --scaling weak --global-batch-size"
    rows = list(csv.DictReader(said(f"{flags} 64", capsys).splitlines()))
    assert [(row["gpus"], row["global_batch_size"]) for row in rows] == [
        ("8", "1"), ("32", "4"), ("128", "16"), ("512", "64")
    ]  # fmt: skip
    rows = list(csv.DictReader(said(f"{flags} 24", capsys).splitlines()))
    assert [(row["gpus"], row["global_batch_size"]) for row in rows] == [("128", "6"), ("512", "24")]
    assert main(f"{flags} 21".split()) == 2
    assert "give a multiple of 64" in capsys.readouterr().err


def test_hybrid_sharding_of_a_rack_is_tried() -> None:
    """A rack's 72 GPUs divide no power of two."""
    asked = asked_for(f"{SMALL} --recompute-granularity none".split(), 128)
    decided = {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "recompute_granularity",
        "micro_batch_size",
    }
    found = list(candidates(asked, 128, DEVICES["gb200"], decided))
    assert {one.config.parallel.hybrid_shard_degree for one in found} == {0, 64}


def test_mixtures_in_bf16_are_warned_of_as_the_page_of_errors_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model olmoe-1b-7b --seq-length 2048 --pipeline-model-parallel-size 1 --micro-batch-size 1 --top 1"
    assert EXPERTS_IN_BF16 in said(f"--gpus 8 --gpu h100 --global-batch-size 32 {flags}", capsys)
    page = (Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8")
    for row in ("| megatron experts blackwell | 10 | 52.7 |", "| megatron experts hopper | 1 | 109.6 |"):
        assert row in page, "the numbers of EXPERTS_IN_BF16 are these, rounded"


def test_layouts_that_differ_by_less_than_the_error_are_alike() -> None:
    errors = ShareErrors()
    one, little, much = (replace(NONE, products=seconds) for seconds in (1.0, 1.05, 1.5))
    assert not told_apart(one, little, errors) and told_apart(one, much, errors)
    # What both have of a share says nothing of their order; what one has more of does.
    linked = replace(NONE, products=0.6, tensor=0.65)
    assert told_apart(one, replace(linked, tensor=0.65), replace(errors, product=0.0, link=0.0))
    assert not told_apart(one, linked, replace(errors, link=0.9))
    assert relative_error(one, replace(errors, product=0.5)) > relative_error(one, errors) > 0.6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu-hour-price 2", "--gpu-hour-price has no effect without --tokens"),
        ("--csv a.csv", "--csv has no effect without --scaling"),
        ("--oversubscription 2", "--oversubscription is of the spine between leaves: give --leaf-gpus, too"),
        ("--leaf-gpus 64 --contention 0.5", "--contention 0.5 has to be at least 1"),
        ("--tokens -1", "--tokens -1.0 has to be above 0"),
        ("--spares 2", "--spares needs --mtbf-hours, --save-seconds and --recovery-seconds"),
        ("--mtbf-hours 9 --save-seconds 1 --recovery-seconds 1 --spares 2", "give both"),
        ("--scaling weak --tokens 1e9", "--tokens has no effect with --scaling"),
        ("--scaling weak --top 3", "--top has no effect with --scaling"),
        ("--scaling weak --what-if=--fp8-format", "--what-if has no effect with --scaling"),
        ("--scaling weak --output a.png", "--output has no effect with --scaling"),
        ("--scaling weak --step-batch-size-schedule 0:8,100:16", "--scaling needs one batch: give --global-batch-size"),
        ("--measure a.yaml --top 3", "--top has no effect with --measure"),
        ("--measure a.yaml --scaling weak", "--scaling has no effect with --measure"),
        ("--measure a.yaml", "--model has no effect with --measure"),
        ("--what-if=--tokens=5", "--what-if: --tokens changes no step"),
        ("--what-if=--watts=5", "--what-if: --watts changes no step"),
        ("--what-if=--gpu=cpu", "--what-if: --gpu cpu is measured, not predicted"),
        ("--what-if='", '--what-if "\'": No closing quotation'),
        ("--gpu h1000", "--gpu h1000 is none of cpu, a100"),
    ],
)
def test_what_says_nothing_is_refused(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "8", "--gpu", "h100", "--model", "llama3.2-1b", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_curves_and_changes_are_not_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpus", "2", "--gpu", "cpu", "--model", "debug", "--scaling", "weak"]) == 2
    assert "--scaling has no effect with --gpu cpu" in capsys.readouterr().err
