"""Mixture of experts: a router sends each token to some of many feed-forward networks (experts), on any rank.

router.py     scores, the choice of experts and their weights, and the auxiliary losses
capacity.py   a bound on the tokens of an expert
sinkhorn.py   choices that are balanced over a sequence
dispatch.py   sends rows of tokens to the ranks of their experts, and results back
experts.py    the networks, one parameter for each projection of all of them
layer.py      the layer that replaces a dense MLP
"""

from smp.layers.moe.experts import Experts
from smp.layers.moe.layer import MoE, SharedExpertGate
from smp.layers.moe.router import Balance, Counted, Router, Routing

__all__ = ["Balance", "Counted", "Experts", "MoE", "Router", "Routing", "SharedExpertGate"]
