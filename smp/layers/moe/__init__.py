"""Mixture of experts: a router gives each token some of many feed-forward networks, on whichever rank they are.

router.py     scores, the choice of experts and their weights, and the auxiliary losses
capacity.py   a bound on the tokens of an expert
sinkhorn.py   choices that are balanced over a sequence
dispatch.py   rows of tokens to the ranks that have their experts, and back
experts.py    the networks, one parameter for each projection of all of them
layer.py      the layer that stands where a dense MLP would
"""

from smp.layers.moe.experts import Experts
from smp.layers.moe.layer import MoE, SharedExpertGate
from smp.layers.moe.router import Balance, Counted, Router, Routing

__all__ = ["Balance", "Counted", "Experts", "MoE", "Router", "Routing", "SharedExpertGate"]
