"""The launcher: a recipe becomes settings, settings become artifacts, artifacts are submitted. Imports no torch: a head
node needs none."""

from smp.launch.library import get_recipe, list_recipes

__all__ = ["get_recipe", "list_recipes"]
