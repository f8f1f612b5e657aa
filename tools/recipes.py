"""Write what is generated from the recipes: docs/recipes.md, and tables of docs/launching.md and docs/hyperpod.md.

python tools/recipes.py
python tools/recipes.py --check                     # says what is out of step, writes nothing
python tools/recipes.py --hyperpod FOLDER           # also the table of HyperPod's recipes in a folder of a release
python tools/recipes.py --check --hyperpod FOLDER   # loads each of them, with the files of a job of every back-end
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smp.config import ConfigError
from smp.config.command_line.command import CommandParser, run_tool
from smp.launch.cli import prepare
from smp.launch.compose import compose
from smp.launch.environment import VARIABLES, known_instances
from smp.launch.hyperpod import FORMS, FeatureError
from smp.launch.library import list_recipes, read_recipe_text
from smp.launch.recipe import Recipe, read_recipe
from smp.launch.yaml_text import load_text
from smp.training.cost.predict import predicted_memory

ROOT = Path(__file__).resolve().parents[1]
LAUNCHING, HYPERPOD = ROOT / "docs/launching.md", ROOT / "docs/hyperpod.md"
HEAD = """\
# Recipes

All recipes of [recipes_collection](../recipes_collection): a file each, or a line of its
[table](../recipes_collection/table.yaml); `main.py --help RECIPE` prints one. [launching.md](launching.md) shows how to
run one.
This page is written by `python tools/recipes.py`.

- Memory (GiB) is predicted, per GPU, for the process that needs most.
- Each layout is the one with the least tensor, pipeline and context parallelism and the least recompute that leaves 15%
  of a GPU's memory free.
- No recipe of several nodes has been run on GPUs yet.

| Recipe | Model | GPUs | Tokens per step | Tensor x pipeline x context x expert | Sharded over | Recompute | GiB |
|---|---|---|---|---|---|---|---|
"""
PLACES = {
    "slurm": ("cluster=slurm", "base_results_dir=/fsx/results"),
    "k8s": (
        *("cluster=k8s", "base_results_dir=/fsx/results", "container=IMAGE", "instance_type=p5.48xlarge"),
        "cluster.persistent_volume_claims=[{claimName:fsx,mountPath:/fsx}]",
    ),
    "sm_jobs": (
        *("cluster=sm_jobs", "container=IMAGE", "instance_type=p5.48xlarge"),
        "cluster.sm_jobs_config.role=arn:aws:iam::111122223333:role/train",
        "cluster.sm_jobs_config.output_path=s3://bucket/output",
    ),
}
"""Words of a job on each back-end."""


def recipes() -> dict[str, Recipe]:
    """Every recipe of the collection."""
    found = {}
    for name in list_recipes():
        composed = compose([f"recipes={name}"])
        found[name] = read_recipe(composed.tree["recipes"], composed.source.stem)
    return found


def row(name: str, recipe: Recipe) -> str:
    """A recipe's line of the table."""
    given = load_text(read_recipe_text(name)[0])
    model = given.get("model") or (given.get("run") or {}).get("base_model") or ""
    config = recipe.config
    if config is None or config.model.vocab_size is None:
        return f"| {name} | {model or 'small'} | {recipe.world_size} | | | | | |"
    parallel, data = config.parallel, config.data
    assert data.global_batch_size is not None and data.seq_length is not None
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    sharded = context * (parallel.hybrid_shard_degree or recipe.world_size // (tensor * pipeline * context))
    memory = predicted_memory(config, recipe.world_size).total / 2**30
    tokens = f"{data.global_batch_size * data.seq_length:,}"
    experts = parallel.expert_model_parallel_size
    degrees = f"{tensor} x {pipeline} x {context} x {experts} | {sharded} | {parallel.recompute_granularity}"
    return f"| {name} | {model} | {recipe.world_size} | {tokens} | {degrees} | {memory:.1f} |"


@dataclass(frozen=True)
class Loaded:
    """What becomes of a recipe of HyperPod's.

    Attributes:
        name: its path in the folder of recipes.
        kind: loads, refused (by feature) or bad.
        said: what is still to give, or why not.
    """

    name: str
    kind: str
    said: str


def load(path: Path, name: str) -> Loaded:
    """Load a recipe of HyperPod's, with the files of a job of every back-end."""
    try:
        composed = compose([f"recipes={path}", *PLACES["slurm"]])
        recipe = read_recipe(composed.tree["recipes"], path.stem)
        for words in PLACES.values():
            prepare([f"recipes={path}", *words])
    except FeatureError as error:
        return Loaded(name, "refused", _without_values(str(error)))
    except ConfigError as error:
        return Loaded(name, "bad", str(error))
    later = f"; finetune.py does not have {recipe.unread} yet" if recipe.unread else ""
    return Loaded(name, "loads", f"to give: {', '.join(recipe.missing)}{later}")


def _without_values(message: str) -> str:
    """A reason that many recipes share: which of Amazon's own models it is does not matter."""
    model, found, rest = message.partition(" is Amazon's own model")
    return f"{model.partition(':')[0]}: Amazon's own model{rest}" if found else message


def catalogue(folder: Path) -> list[Loaded]:
    """Every recipe of a folder of HyperPod's."""
    root = folder / "recipes_collection/recipes"
    paths = sorted(root.rglob("*.yaml"))
    if not paths:
        raise ConfigError(f"--hyperpod {folder}: there is no recipe in {root}")
    return [load(path, path.relative_to(root).with_suffix("").as_posix()) for path in paths]


def summary(found: Sequence[Loaded]) -> str:
    """Numbers of a catalogue."""
    counts = Counter(one.kind for one in found)
    return f"{len(found)} recipes: {counts['loads']} load, {counts['refused']} refused by feature, {counts['bad']} bad"


def catalogue_table(found: Sequence[Loaded]) -> str:
    """What becomes of a catalogue: recipes of which the same is true share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in found:
        groups.setdefault((one.kind, one.said), []).append(one.name)
    rows = [
        f"| {len(names)} | {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} | {kind}; {said} |"
        for (kind, said), names in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    ]
    return "\n".join([f"{summary(found)}.", "", "| | Recipes | |", "|---|---|---|", *rows])


def tables() -> dict[Path, dict[str, str]]:
    """The generated parts of pages."""
    environment = [
        f"| `{name}={value.value}` | {value.when} | {value.why} | {value.source} |" for name, value in VARIABLES.items()
    ]
    machines = [
        f"| {kind.name} | {kind.devices} | {kind.memory_gib} | {kind.efa} | {'yes' if kind.rdma else 'no'} |"
        for kind in known_instances().values()
    ]
    keys = {
        f"keys of {form.name}": "\n".join(
            ["| Key | becomes |", "|---|---|", *(f"| `{name}` | {key.text} |" for name, key in form.keys.items())]
        )
        for form in FORMS.values()
    }
    return {
        LAUNCHING: {
            "environment": "\n".join(["| Variable | when | why | source |", "|---|---|---|---|", *environment]),
            "machines": "\n".join(
                ["| Type | GPUs | GB each | EFA | GPUDirect RDMA |", "|---|---|---|---|---|", *machines]
            ),
        },
        HYPERPOD: keys,
    }


def with_table(page: str, name: str, table: str) -> str:
    """``page`` with what is between two markers replaced."""
    begin, end = f"<!-- {name}: written by tools/recipes.py -->", f"<!-- end of {name} -->"
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def generated(catalogues: dict[Path, list[Loaded]]) -> dict[Path, str]:
    """Every file that follows from the recipes."""
    files = {ROOT / "docs/recipes.md": HEAD + "\n".join(row(*item) for item in recipes().items()) + "\n"}
    for path, parts in tables().items():
        page = path.read_text(encoding="utf-8")
        for name, table in parts.items():
            page = with_table(page, name, table)
        files[path] = page
    for folder, found in catalogues.items():
        files[HYPERPOD] = with_table(files[HYPERPOD], f"catalogue {folder.name}", catalogue_table(found))
    return files


def run(argv: Sequence[str] | None) -> int:
    """Write or check all files."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when something is wrong")
    parser.add_argument(
        "--hyperpod",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="HyperPod's recipes of a release, whose name the folder has; may be given again",
    )
    given = parser.parse_args(argv)
    catalogues = {folder: catalogue(folder) for folder in given.hyperpod}
    for folder, found in catalogues.items():
        print(f"{folder}: {summary(found)}")
        print(*(f"bad: {one.name}: {one.said}\n" for one in found if one.kind == "bad"), sep="", end="")
    files = generated(catalogues)
    wrong = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in wrong:
        print(f"{'out of step' if given.check else 'written'}: {path.relative_to(ROOT)}")
        if not given.check:
            path.write_text(files[path], encoding="utf-8")
    bad = any(one.kind == "bad" for found in catalogues.values() for one in found)
    return 1 if bad or (given.check and wrong) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when --check found something or a recipe is bad, 2 when it cannot be done."""
    return run_tool(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
