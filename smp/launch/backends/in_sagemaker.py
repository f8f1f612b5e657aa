"""Entry point of a SageMaker training job's container: hyper-parameters become a torchrun command.

Which nodes there are is in /opt/ml/input/config/resourceconfig.json; the hyper-parameters are in SM_HPS (where
SageMaker's toolkit runs) or hyperparameters.json next to it. What a model-parallel estimator adds (mp_parameters) is
left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from smp.config.command_line.credentials import without_credentials
from smp.launch.job import MODULES, to_yaml
from smp.launch.library import SUPERVISE

ML = Path("/opt/ml")
PORT = 29500
_NOT_SETTINGS = ("mp_parameters", "sagemaker_", "smp_")


def hyper_parameters(environment: Mapping[str, str], ml: Path) -> dict[str, Any]:
    """Hyper-parameters by name. The API keeps text; SDK and toolkit put JSON into it."""
    # A toolkit's variable where there is one; the file is always there.
    text = environment.get("SM_HPS") or (ml / "input/config/hyperparameters.json").read_text(encoding="utf-8")
    return {name: _value(value) for name, value in json.loads(text).items()}


def _value(value: Any) -> Any:
    """A text without the JSON quotes that the SDK puts around it. Settings parse their numbers themselves."""
    if isinstance(value, str) and len(value) > 1 and value[0] == '"' == value[-1]:
        with suppress(ValueError):
            return json.loads(value)
    return value


def command(values: Mapping[str, Any], resources: Mapping[str, Any], ml: Path) -> tuple[list[str], str]:
    """The words to run, and the text of the settings' file.

    Args:
        values: hyper-parameters.
        resources: what resourceconfig.json says.
        ml: the folder /opt/ml.
    """
    # Sorted, so that all nodes take the same one as the meeting point.
    hosts = sorted(resources["hosts"])
    nodes = [f"--nnodes={len(hosts)}", f"--nproc-per-node={values['smp_devices']}"]
    if len(hosts) > 1:
        # c10d needs no server of its own: torchrun on the first host keeps the store.
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0]}:{PORT}", "--rdzv-id=training"]
        nodes += [*meeting, f"--node-rank={hosts.index(resources['current_host'])}"]
    else:
        # A single node needs no meeting point; --standalone picks a free port.
        nodes = ["--standalone", *nodes[1:]]
    settings = {name: value for name, value in values.items() if not name.startswith(_NOT_SETTINGS)}
    status = str(ml / "output/data/status.json")
    start = [
        sys.executable,
        str(SUPERVISE),
        "node",
        status,
        "--",
        sys.executable,
        "-m",
        "torch.distributed.run",
    ]
    if values["smp_task"] == "custom":
        return [*start, *nodes, *json.loads(values["smp_script"])], ""
    own = ["--status-file", status, "--no-progress-bar"]
    # A job that SageMaker restarts continues from the checkpoints that it has copied back.
    own += ["--resume"] if values["smp_task"] == "finetune" else [] if "load" in settings else ["--load", "auto"]
    script = ["-m", MODULES[values["smp_task"]], "--config", str(ml / "settings.yaml")]
    return [*start, *nodes, *script, *own], to_yaml(settings)


def main() -> None:
    """Write the settings and become the training process."""
    resources = json.loads((ML / "input/config/resourceconfig.json").read_text(encoding="utf-8"))
    words, settings = command(hyper_parameters(os.environ, ML), resources, ML)
    (ML / "settings.yaml").write_text(settings, encoding="utf-8")
    print(without_credentials(" ".join(words)), flush=True)
    # exec: the container's first process is the one that gets SIGTERM.
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
