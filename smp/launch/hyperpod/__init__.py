"""HyperPod's recipes (v1, model type hf): what every one of their keys becomes.

One table, ``KEYS`` in keys.py, says it for each key: a setting, a refusal with its reason and the nearest thing, or
that it changes nothing here. docs/launching.md is generated from it. A key that is not in it is an error, so nothing is
dropped in silence. ``key.py`` has the kinds of keys, ``values.py`` what becomes of a value that is not copied,
``translate.py`` goes through a recipe.
"""

from smp.launch.hyperpod.keys import KEYS
from smp.launch.hyperpod.translate import Translated, flatten, translate

__all__ = ["KEYS", "Translated", "flatten", "translate"]
