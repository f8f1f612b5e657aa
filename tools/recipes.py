"""Write the files generated from the recipes: docs/recipes.md, tables of docs/launching.md, and launcher_scripts/.

python tools/recipes.py
python tools/recipes.py --check                     # says what is out of step, writes nothing
python tools/recipes.py --hyperpod CHECKOUT         # also the table of HyperPod's recipes v1, from a checkout of them
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from smp.config import ConfigError
from smp.config.command import CommandParser, run_tool
from smp.launch.compose import compose
from smp.launch.environment import VARIABLES, known_instances
from smp.launch.hyperpod import KEYS
from smp.launch.library import collection, find_recipe
from smp.launch.recipe import Recipe, read_recipe
from smp.launch.yaml_text import load_text
from smp.training.describe import predicted_memory

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/launching.md"
HEAD = """\
# Recipes

All recipes of [recipes_collection](../recipes_collection/recipes). [launching.md](launching.md) shows how to run one.
This page is written by `python tools/recipes.py`.

- Memory (GiB) is predicted, per GPU, for the process that needs most.
- Each layout is the one with the least tensor, pipeline and context parallelism and the least recompute that leaves 15%
  of a GPU's memory free.
- No recipe of several nodes has been run on GPUs yet.

| Recipe | Model | GPUs | Tokens per step | Tensor x pipeline x context x expert | Sharded over | Recompute | GiB |
|---|---|---|---|---|---|---|---|
"""
SCRIPT = """\
#!/bin/bash
{title}
# Written by tools/recipes.py. More words are passed on: keys of main.py.
#
#     CLUSTER=slurm {usage} EXP_DIR=/fsx/exp bash {path} [key=value ...]
set -euo pipefail
cd "${{SMP_DIR:-$(dirname "$0")/{up}}}"
exec python3 main.py \\
    recipes={name} \\
    cluster="${{CLUSTER:-{cluster}}}" \\
    base_results_dir="${{EXP_DIR:-results}}/results" \\
{words}    "$@"
"""
VARIABLES_OF = {
    "load": ("HF_MODEL_NAME_OR_PATH", "/fsx/models/llama", "folder of the model"),
    "data_path": ("TRAIN_DIR", "/fsx/data/corpus", "training data"),
}


def recipes() -> dict[str, Recipe]:
    """Every recipe of the collection."""
    folder = collection() / "recipes"
    names = sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))
    found = {}
    for name in names:
        composed = compose([f"recipes={name}"])
        found[name] = read_recipe(composed.tree["recipes"], composed.source.stem)
    return found


def row(name: str, recipe: Recipe) -> str:
    """A recipe's line of the table."""
    given = load_text(find_recipe(name).read_text(encoding="utf-8"))
    model = given.get("model") or (given.get("run") or {}).get("base_model") or ""
    link = f"[{name}](../recipes_collection/recipes/{name}.yaml)"
    config = recipe.config
    if config is None or config.model.vocab_size is None:
        return f"| {link} | {model or 'small'} | {recipe.world_size} | | | | | |"
    parallel, data = config.parallel, config.data
    assert data.global_batch_size is not None and data.seq_length is not None
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    sharded = context * (parallel.hybrid_shard_degree or recipe.world_size // (tensor * pipeline * context))
    memory = predicted_memory(config, recipe.world_size).total / 2**30
    tokens = f"{data.global_batch_size * data.seq_length:,}"
    experts = parallel.expert_model_parallel_size
    degrees = f"{tensor} x {pipeline} x {context} x {experts} | {sharded} | {parallel.recompute_granularity}"
    return f"| {link} | {model} | {recipe.world_size} | {tokens} | {degrees} | {memory:.1f} |"


def script(name: str, recipe: Recipe) -> str:
    """The shell script of a recipe."""
    title = find_recipe(name).read_text(encoding="utf-8").splitlines()[0]
    given = [key for key in ("load", "data_path") if key in recipe.missing]
    words = [f'    recipes.{key}="${{{VARIABLES_OF[key][0]}:?{VARIABLES_OF[key][2]}}}" \\\n' for key in given]
    path = script_path(name)
    return SCRIPT.format(
        title=title if title.startswith("#") else f"# {name}.",
        usage=" ".join(f"{VARIABLES_OF[key][0]}={VARIABLES_OF[key][1]}" for key in given),
        path=path,
        up="/".join([".."] * (len(path.parts) - 1)),
        name=name,
        cluster="local" if recipe.num_nodes == 1 else "slurm",
        words="".join(words),
    ).replace("slurm  EXP", "slurm EXP")


def script_path(name: str) -> Path:
    """Where the script of a recipe is."""
    folder, _, stem = name.rpartition("/")
    return Path("launcher_scripts") / folder / f"run_{stem}.sh"


def hyperpod_table(checkout: Path) -> str:
    """What becomes of every GPU recipe for Hugging Face models of HyperPod's recipes v1."""
    folder = checkout / "recipes_collection/recipes"
    rows = ["| Recipe of HyperPod v1 | |", "|---|---|"]
    for path in sorted(folder.rglob("*.yaml")):
        text = load_text(path.read_text(encoding="utf-8"))
        model_type = (text.get("run") or {}).get("model_type")
        if model_type != "hf" or (text.get("trainer") or {}).get("accelerator") != "gpu":
            continue
        try:
            composed = compose([f"recipes={path}"])
            recipe = read_recipe(composed.tree["recipes"], path.stem)
            said = f"loads; to give: {', '.join(recipe.missing)}"
        except ConfigError as error:
            said = f"refused: {error}"
        rows.append(f"| {path.relative_to(folder).with_suffix('').as_posix()} | {said} |")
    return "\n".join(rows)


def tables() -> dict[str, str]:
    """The generated parts of docs/launching.md."""
    keys = [f"| `{name}` | {key.text} |" for name, key in KEYS.items()]
    environment = [
        f"| `{name}={value.value}` | {value.when} | {value.why} | {value.source} |" for name, value in VARIABLES.items()
    ]
    machines = [
        f"| {kind.name} | {kind.devices} | {kind.memory_gib} | {kind.efa} | {'yes' if kind.rdma else 'no'} |"
        for kind in known_instances().values()
    ]
    return {
        "keys": "\n".join(["| Key of HyperPod v1 | becomes |", "|---|---|", *keys]),
        "environment": "\n".join(["| Variable | when | why | source |", "|---|---|---|---|", *environment]),
        "machines": "\n".join(["| Type | GPUs | GB each | EFA | GPUDirect RDMA |", "|---|---|---|---|---|", *machines]),
    }


def with_table(page: str, name: str, table: str) -> str:
    """``page`` with what is between two markers replaced."""
    begin, end = f"<!-- {name}: written by tools/recipes.py -->", f"<!-- end of {name} -->"
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"


def generated(checkout: Path | None) -> dict[Path, str]:
    """Every file that follows from the recipes."""
    found = recipes()
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        page = with_table(page, name, table)
    if checkout is not None:
        page = with_table(page, "hyperpod", hyperpod_table(checkout))
    files = {ROOT / "docs/recipes.md": HEAD + "\n".join(row(*item) for item in found.items()) + "\n", PAGE: page}
    return files | {ROOT / script_path(name): script(name, recipe) for name, recipe in found.items()}


def out_of_step(files: dict[Path, str]) -> list[Path]:
    """Files that are not as they should be, and scripts of recipes that are gone."""
    wrong = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return wrong + [path for path in (ROOT / "launcher_scripts").rglob("run_*.sh") if path not in files]


def run(argv: Sequence[str] | None) -> int:
    """Write or check all files."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when a file is out of step")
    parser.add_argument("--hyperpod", type=Path, metavar="CHECKOUT", help="checkout of HyperPod's recipes, branch v1")
    given = parser.parse_args(argv)
    files = generated(given.hyperpod)
    wrong = out_of_step(files)
    for path in wrong:
        print(f"{'out of step' if given.check else 'written'}: {path.relative_to(ROOT)}")
        if not given.check:
            write(path, files.get(path))
    return 1 if given.check and wrong else 0


def write(path: Path, text: str | None) -> None:
    """Write a file, or remove it when it has no text."""
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755 if path.suffix == ".sh" else 0o644)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 when --check found something, 2 when it cannot be done."""
    return run_tool(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
