"""AWS's own launcher scripts, unchanged: what they type arrives in the settings, or is named in the notes.

``SMP_HYPERPOD_CHECKOUT`` names a checkout of sagemaker-hyperpod-recipes, with its ``launcher_scripts``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from smp.launch.cli import prepare
from smp.launch.hyperpod import FeatureError
from smp.launch.job import Job

CHECKOUT = os.environ.get("SMP_HYPERPOD_CHECKOUT")
RECORDER = (
    "import json, pathlib, sys\npathlib.Path(__file__).with_name('words.json').write_text(json.dumps(sys.argv[1:]))"
)
PATH = "/data/"
"""Where all that a script asks for in variables is; the claim of AWS's scripts for Kubernetes is mounted there."""
CLAIM = "cluster.persistent_volume_claims=[{claimName: fsx-claim, mountPath: /data}]"


def words_of(script: Path, folder: Path) -> list[str]:
    """What a script types to main.py; each of its variables is a path with the variable's name."""
    names = set(re.findall(r'^(\w+)="?\$\{?\1\b', script.read_text(), re.MULTILINE))
    values = {name: f"{PATH}{name}" for name in names} | {
        "NAMESPACE": "ns",
        "CLUSTER_TYPE": "k8s",
        "CONTAINER_MOUNT": "/data",
    }
    values["SAGEMAKER_TRAINING_LAUNCHER_DIR"] = str(folder)
    subprocess.run(["bash", str(script)], env=os.environ | values, check=True, capture_output=True)
    return [word for word in json.loads((folder / "words.json").read_text()) if word]


def lost(job: Job, words: list[str]) -> list[str]:
    """Words with a path that is in no setting, and that no note names."""
    values = [str(value) for value in [*job.recipe.settings.values(), job.tree.get("container"), job.cluster]]
    noted = [note.partition(":")[0] for note in job.recipe.notes]
    return [
        word
        for word in words
        if (path := word.partition("=")[2]).startswith(PATH)
        and not any(re.search(rf"{re.escape(path)}(?![\w.-])", value) for value in values)  # whole: one begins another
        and word.partition("=")[0].lstrip("+").removeprefix("recipes.") not in noted
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(CHECKOUT is None, reason="SMP_HYPERPOD_CHECKOUT names no checkout")
def test_what_scripts_type_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "main.py").write_text(RECORDER)
    assert CHECKOUT is not None
    (tmp_path / "recipes_collection").symlink_to(Path(CHECKOUT) / "recipes_collection")
    monkeypatch.chdir(tmp_path)
    ran = refused = 0
    scripts = sorted((Path(CHECKOUT) / "launcher_scripts").rglob("*.sh"))
    for script in (path for path in scripts if "nova" not in path.parts and path.parent.name != "custom_script"):
        words = words_of(script, tmp_path)
        on_claim = [CLAIM] if "cluster=k8s" in words else []
        try:
            job, _ = prepare([*words, *on_claim, f"base_results_dir={PATH}results", "dry_run=true"])
        except FeatureError:
            refused += 1
            continue
        assert not lost(job, words), script.name
        ran += 1
    assert ran >= 20 and refused <= ran / 20, (ran, refused)
