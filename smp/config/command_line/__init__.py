"""From a command line to settings: flags, YAML, ``--help``, errors with the nearest name. Imports no torch.

Read :mod:`smp.config.command_line.fields` first: one :class:`~smp.config.command_line.fields.Setting` per field of the
schema, and the one rule from text to value. ``cli`` reads flags and YAML, ``entry_points`` says which settings
``pretrain_gpt.py`` and ``finetune.py`` have, ``command`` what every command of the project shares.
"""
