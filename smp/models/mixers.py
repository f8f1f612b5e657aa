"""Registration of a kind of mixer from outside of smp: its name, spec, builder, parameters and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from smp.config.layers import MIXERS, MixerResolver
from smp.models.arithmetic import PAIR_FLOPS
from smp.models.build_layers import MIXER_BUILDERS, MixerBuilder
from smp.models.inventory import MIXER_PARAMETERS, Parameter


def register_mixer(
    name: str,
    spec: type,
    *,
    resolve: MixerResolver,
    build: MixerBuilder,
    parameters: Callable[[Any, int, str], Iterator[Parameter]],
    pair_flops: Callable[[Any], int] | None = None,
) -> None:
    """Let ``--layer-types`` name a kind of mixer. Call it before settings are resolved, in every process.

    Args:
        name: for --layer-types.
        spec: a frozen dataclass: the settings of one such mixer. Its text names it in ``--dry-run``.
        resolve: (resolved model settings, number of the layer) -> its spec.
        build: (spec, :class:`smp.models.build_layers.Build`) -> the module, see :class:`smp.layers.mixer.Mixer`. Its
            parameters come from ``smp.layers.parameter`` or from layers of this package.
        parameters: (spec, hidden size, name of the module) -> its parameters as the inventory has them, with the FLOPs
            of their products.
        pair_flops: of a spec, FLOPs of a forward pass for each pair of a token and a token that it sees; the spec then
            has ``window`` and ``chunk``. None: there are none.

    Raises:
        ValueError: the name or the type of the spec is taken.
    """
    # A second registration would silently replace the first, in this process only.
    if name in MIXERS or spec in MIXER_BUILDERS:
        raise ValueError(f"a mixer {name!r}, or one with the spec {spec.__name__}, is registered already")
    # All tables at once: settings, modules, inventory and FLOPs never know different mixers.
    MIXERS[name], MIXER_BUILDERS[spec], MIXER_PARAMETERS[spec] = resolve, build, parameters
    if pair_flops is not None:
        PAIR_FLOPS[spec] = pair_flops
