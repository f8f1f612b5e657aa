"""The launcher: a recipe becomes settings, settings become artifacts, and artifacts are submitted. Imports no torch,
which a head node need not have.

Read ``job`` first: a recipe, a back-end and a folder. ``compose`` makes one tree of files and overrides, ``recipe``
settings of it, :mod:`smp.launch.hyperpod` translates AWS's recipes, :mod:`smp.launch.backends` submits.
"""

from smp.launch.library import get_recipe, list_recipes

__all__ = ["get_recipe", "list_recipes"]
