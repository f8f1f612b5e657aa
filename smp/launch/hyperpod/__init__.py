"""HyperPod's recipes: the translation of each of their keys.

They come in forms, one for each trainer of HyperPod's (``run.model_type``). A form has one table, which says for each
key: a setting, a refusal with its reason and the nearest thing, or that it changes nothing here. docs/hyperpod.md is
generated from them. A key that is not in it is an error, and so are two keys that say different things of one setting,
so nothing is dropped in silence.

``key.py`` has the kinds of keys, ``form.py`` what a form is, ``forms.py`` the list of them. ``keys.py`` (release 1),
``llmft.py``, ``verl.py``, ``verl_rl.py`` and ``checkpointless.py`` are the tables; what they do not copy is in
``values.py`` and ``verl_rl_values.py``, what they share in ``tuning.py``. ``translate.py`` goes through a recipe,
``known.py`` through keys on a recipe of this project's.
"""

from smp.launch.hyperpod.form import COMMON, Form
from smp.launch.hyperpod.forms import FORMS, form_of, has_its_sections, key_of
from smp.launch.hyperpod.key import FeatureError
from smp.launch.hyperpod.keys import KEYS, V1
from smp.launch.hyperpod.known import override
from smp.launch.hyperpod.translate import Translated, flatten, translate
from smp.launch.hyperpod.tuning import unread

OWN_MODEL = "settings.model"
"""The setting ``model`` in a HyperPod recipe, where ``model`` itself is a section."""

__all__ = [
    "COMMON",
    "FORMS",
    "KEYS",
    "OWN_MODEL",
    "V1",
    "FeatureError",
    "Form",
    "Translated",
    "flatten",
    "form_of",
    "has_its_sections",
    "key_of",
    "override",
    "translate",
    "unread",
]
