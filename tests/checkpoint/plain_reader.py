"""The reader printed in docs/checkpoint-format.md: json, safetensors and numpy, nothing of this package, no torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

NUMPY = {
    "F64": "f8",
    "F32": "f4",
    "F16": "f2",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def read_checkpoint(folder: Path) -> tuple[dict[str, np.ndarray], dict]:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("smp-checkpoint", 1)
    files = {name: load_file(folder / name) for name in manifest["files"]}
    tensors = {}
    for name, entry in manifest["tensors"].items():
        tensors[name] = np.empty(entry["shape"], NUMPY[entry["dtype"]])
        for shard in entry["shards"]:
            region = tuple(slice(o, o + n) for o, n in zip(shard["offsets"], shard["sizes"], strict=True))
            tensors[name][region] = files[shard["file"]][shard["key"]]
    return tensors, manifest["extra"]
