"""Composes command lines as hydra-core does, for tests/launch/test_hydra.py; run by a Python that has it.

Reads lines of JSON, [tree, words], and answers each with {"tree": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import sys


def answer(tree: dict, words: list[str]) -> dict:
    # here, because other Pythons read this file too
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.create(tree)
        overrides = OverridesParser.create().parse_overrides(words)
        if any(override.is_sweep_override() for override in overrides):
            return {"error": "sweep"}
        ConfigLoaderImpl._apply_overrides_to_config(overrides, config)
        return {"tree": OmegaConf.to_container(config, resolve=True)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


for line in sys.stdin:
    print(json.dumps(answer(*json.loads(line))), flush=True)
