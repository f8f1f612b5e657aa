"""Collectives that know the network: which ranks are on one node, and what links carry. See docs/collectives.md.

Read ``collective_schedule`` first: what a collective is. ``schedules`` makes them, ``validate_collective`` proves them,
``simulate_collective``, ``cost`` and ``fabric`` time them, ``collective_picture`` draws them; these and ``topology``
import no torch. ``run`` executes a schedule, ``quantize`` rounds what crosses uplinks, ``group`` binds all of it to a
process group, ``measure`` and ``select_collectives`` decide.
"""
