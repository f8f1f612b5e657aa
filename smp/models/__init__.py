"""The decoder, the protocol that every trained model follows, the inventory of parameters, named sizes.

Read :mod:`smp.models.protocol` first, then ``gpt``. ``mixers`` is the registry of mixers, ``inventory`` has every
parameter's name, shape and cut, ``presets`` the named sizes, ``arithmetic`` parameters and FLOPs.
"""
