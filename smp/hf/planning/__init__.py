"""Which module of a Hugging Face model is cut how, decided before the model is changed.

Read :mod:`smp.hf.planning.module_plan` first: it matches modules with ``rows`` (transformers' plans, this project's,
the caller's) and ``unnamed`` (linear layers that no plan names), refuses what would be wrong, and ``share`` says how
much of the model is cut.
"""
