"""Layouts of newer families: scales, caps, norms and layers of their own beside every other way to split."""

from __future__ import annotations

from typing import Any

from tests.parity.cases import Case, Problem, Spread


def _case(extra: str, problem: dict[str, Any] | None = None, **spread: Any) -> Case:
    layout = Spread(**spread)
    made = {"kv_heads": 2, "length": 16 if layout.cp > 1 else 15, "steps": 2, "micro_batch": 2, "unequal": True}
    made |= {"extra": extra, "micro_batches": layout.data_parallel * layout.accumulation, **(problem or {})}
    return Case(Problem(**made), layout)


def fast_cases() -> list[Case]:
    """Each family once, and among them every way to split."""
    return [
        _case("gemma", {"tied": True, "clip": True}, tp=2, sp=True, recompute="selective", chunk_bytes=1000),
        _case("gemma", {}, cp=2, exchange="p2p"),
        _case("gemma", {"layers": 4, "micro_batch": 1}, pp=2, schedule="1f1b", accumulation=2),
        _case("attention bias", {}, tp=2, sp=True, shard=2),
        _case("mlp bias", {"clip": True}, tp=2, sp=True, recompute="selective"),
        _case("dynamic", {"packed": True}, cp=2, exchange="p2p"),
        _case("olmo", {"kv_heads": 4}, tp=2, sp=True, recompute="full"),
        _case("command", {}, tp=2, shard=2),
        _case("bloom", {"kv_heads": 4, "tied": True}, cp=2, exchange="a2a"),
        _case("hybrid", {"packed": True}, tp=2, sp=True, recompute="selective"),
        _case("hybrid", {"layers": 4, "micro_batch": 1, "experts": "qwen2"}, pp=2, schedule="1f1b", accumulation=2),
        _case("hybrid", {"experts": "qwen2"}, shard=2, ep=2),
        _case("hybrid", {"packed": True}, cp=2, exchange="p2p"),
        _case("hybrid", {"packed": True}, cp=2, exchange="a2a"),
        _case("hybrid", {}, cp=4, exchange="p2p"),
        _case("mamba", {"packed": True}, tp=2, sp=True, recompute="selective"),
        _case("one group", {"packed": True}, tp=4, sp=True),
        _case("mamba", {"packed": True}, cp=2, exchange="p2p"),
        _case("mamba", {}, cp=2, exchange="a2a"),
        _case("nemotron", {"layers": 4, "micro_batch": 1}, pp=2, schedule="1f1b", accumulation=2),
        _case("nemotron experts", {"layers": 4, "experts": "squared relu"}, shard=2, ep=2),
        _case("falcon h1", {"packed": True, "clip": True}, tp=2, sp=True, recompute="selective"),
        _case("falcon h1", {"layers": 4, "micro_batch": 1}, pp=2, schedule="1f1b", accumulation=2),
        _case("falcon h1", {"packed": True}, cp=2, exchange="p2p"),
        _case("delta net and attention", {"experts": "qwen2"}, shard=2, ep=2, recompute="full"),
        _case("olmo hybrid", {"packed": True}, tp=2, sp=True, recompute="selective"),
        _case("olmo hybrid", {"layers": 4, "micro_batch": 1}, pp=2, schedule="1f1b", accumulation=2),
        _case("kimi", {"kv_heads": 4, "packed": True}, tp=2, sp=True, recompute="selective"),
        _case("kimi", {"kv_heads": 4, "packed": True, "experts": "sigmoid"}, cp=2, exchange="p2p", shard=2, ep=2),
        _case("kimi", {"kv_heads": 4, "packed": True}, cp=2, exchange="a2a"),
        _case("kimi", {"kv_heads": 4, "layers": 4, "micro_batch": 1}, pp=2, schedule="1f1b", accumulation=2),
        _case("dsa", {"packed": True, "clip": True}, tp=2, sp=True, recompute="selective"),
        _case("dsa", {"layers": 4, "micro_batch": 1, "mtp": 1}, pp=2, schedule="1f1b", accumulation=2),
        _case("dsa", {"packed": True}, cp=2, exchange="p2p", recompute="full"),
        _case("dsa", {"experts": "deepseek"}, shard=2, ep=2),
        _case("dsa dense loss", {"packed": True}, tp=2, shard=2, accumulation=2),
        _case("dsa dense loss", {}, cp=2, exchange="a2a", tp=2, sp=True),
        _case("dsa warm-up", {"layers": 4, "micro_batch": 1, "packed": True}, pp=2, schedule="zb-v", accumulation=4),
        _case("dsa warm-up", {}, tp=2, sp=True, shard=2),
    ]


def slow_cases() -> list[Case]:
    """More of the product."""
    pipeline: dict[str, Any] = {"pp": 2, "accumulation": 4}
    return [
        _case("gemma", {"kv_heads": 1}, tp=2, shard=2, accumulation=3, recompute="full"),
        _case("gemma", {}, cp=2, exchange="all_gather", tp=2, sp=True),
        _case("gemma", {"packed": True}, cp=2, exchange="a2a"),
        _case("gemma", {"packed": True, "dropout": True}, tp=2, sp=True),
        _case("gemma", {"packed": True}, cp=4, exchange="p2p"),
        _case(
            "gemma", {"layers": 4, "tied": True, "micro_batch": 1}, schedule="interleaved", tp=2, sp=True, **pipeline
        ),
        _case("gemma", {"layers": 4, "micro_batch": 1}, schedule="zb-v", **pipeline),
        _case("gemma", {"clip": True}, shard=2, replicate=2, recompute="selective"),
        _case("attention bias", {"layers": 4, "micro_batch": 1}, schedule="zb-h1", tp=2, **pipeline),
        _case("attention bias", {"packed": True}, cp=2, exchange="a2a", tp=2, sp=True),
        _case("attention bias", {"dropout": True}, shard=2, replicate=2, recompute="full"),
        _case("mlp bias", {"layers": 4, "micro_batch": 1}, schedule="zb-v", **pipeline),
        _case("mlp bias", {"tied": True}, cp=2, exchange="all_gather", shard=2),
        _case("mlp bias", {"dropout": True}, tp=4, sp=True, accumulation=2),
        _case("dynamic", {"packed": True}, cp=4, exchange="p2p"),
        _case("dynamic", {"packed": True}, tp=2, sp=True, recompute="full"),
        _case("dynamic", {"layers": 4, "micro_batch": 1}, schedule="1f1b", **pipeline),
        _case("command", {"dropout": True}, tp=2, sp=True, recompute="selective"),
        _case("command", {"tied": True, "layers": 4, "micro_batch": 1}, schedule="zb-h1", **pipeline),
        _case("olmo", {"kv_heads": 4, "dropout": True}, tp=4, sp=True),
        _case("dsa", {"packed": True}, tp=4, sp=True, recompute="full"),
        _case("dsa", {"packed": True}, cp=4, exchange="all_gather"),
        _case("dsa", {"packed": True, "length": 32}, cp=2, exchange="p2p", tp=2, sp=True),
        _case("dsa", {"layers": 4, "micro_batch": 1}, schedule="zb-h1", tp=2, sp=True, **pipeline),
        _case("dsa", {"layers": 4, "micro_batch": 1, "packed": True}, schedule="interleaved", **pipeline),
        _case("dsa", {"layers": 4, "micro_batch": 1, "experts": "deepseek"}, schedule="zb-v", **pipeline),
        _case("dsa", {"experts": "deepseek"}, tp=2, sp=True, shard=2, ep=2),
        _case("dsa", {"packed": True, "clip": True}, shard=2, replicate=2, recompute="selective", accumulation=2),
        _case("dsa dense loss", {"layers": 4, "micro_batch": 1, "mtp": 1}, schedule="1f1b", **pipeline),
        _case("dsa dense loss", {"packed": True}, cp=2, exchange="p2p", shard=2),
        _case("dsa warm-up", {"packed": True, "clip": True}, cp=2, exchange="p2p", recompute="full"),
        _case("dsa warm-up", {"layers": 4, "micro_batch": 1}, schedule="1f1b", shard=2, **pipeline),
        _case("dsa warm-up", {"experts": "deepseek"}, shard=2, ep=2, recompute="selective"),
        _case("hybrid", {"packed": True, "clip": True}, tp=4, sp=True, recompute="full"),
        _case("hybrid", {"tied": True, "dropout": True}, tp=2, shard=2, accumulation=2),
        _case("hybrid", {"packed": True}, shard=2, replicate=2, recompute="full"),
        _case("hybrid", {"layers": 4, "micro_batch": 1, "packed": True}, schedule="zb-v", **pipeline),
        _case("hybrid", {"layers": 4, "micro_batch": 1}, schedule="zb-h1", tp=2, sp=True, **pipeline),
        _case("hybrid", {"layers": 4, "micro_batch": 1}, schedule="interleaved", **pipeline),
        _case("hybrid", {"experts": "qwen2"}, tp=2, sp=True, shard=2, ep=2),
        _case("hybrid", {"length": 70, "packed": True}, tp=2, sp=True),
        _case("hybrid", {}, cp=2, exchange="all_gather", tp=2, sp=True, recompute="full"),
        _case("hybrid", {"packed": True}, cp=4, exchange="p2p", tp=2, sp=True),
        _case("hybrid", {"packed": True, "length": 160}, cp=4, exchange="all_gather"),
        _case("hybrid", {}, cp=4, exchange="a2a", recompute="selective"),
        _case("hybrid", {"packed": True}, cp=2, exchange="a2a", tp=2, sp=True, shard=2),
        _case("hybrid", {"packed": True, "experts": "qwen2"}, cp=2, exchange="p2p", shard=2, ep=2),
        _case(
            "hybrid", {"packed": True, "layers": 4, "micro_batch": 1}, cp=2, exchange="p2p", schedule="zb-v", **pipeline
        ),
        _case("mamba", {"packed": True, "clip": True}, tp=4, sp=True, recompute="full"),
        _case("mamba", {"tied": True, "dropout": True}, tp=2, shard=2, accumulation=2),
        _case("mamba", {"layers": 4, "micro_batch": 1, "packed": True}, schedule="zb-v", **pipeline),
        _case("mamba", {"length": 70, "packed": True}, tp=2, sp=True),
        _case("mamba", {"packed": True}, cp=2, exchange="a2a", tp=2, sp=True, shard=2),
        _case("mamba", {}, cp=2, exchange="p2p", recompute="selective"),
        _case("mamba", {"packed": True, "length": 160}, cp=4, exchange="all_gather"),
        _case("mamba", {"packed": True, "experts": "qwen2"}, cp=2, exchange="p2p", shard=2, ep=2),
        _case("one group", {}, tp=2, cp=2, exchange="p2p", recompute="full"),
        _case("one group", {"packed": True}, tp=2, shard=2, replicate=2),
        _case("one group", {"layers": 4, "micro_batch": 1}, schedule="zb-h1", tp=2, sp=True, **pipeline),
        _case("nemotron", {"layers": 4, "packed": True, "dropout": True}, tp=2, sp=True, recompute="full"),
        _case("nemotron", {"layers": 4, "packed": True}, cp=2, exchange="a2a", tp=2, sp=True),
        _case("nemotron", {"layers": 4, "micro_batch": 1}, schedule="interleaved", **pipeline),
        _case("nemotron", {"layers": 4, "micro_batch": 1}, schedule="zb-v", **pipeline),
        _case("nemotron experts", {"layers": 4, "experts": "squared relu"}, tp=2, sp=True, shard=2, ep=2),
        _case("nemotron experts", {"layers": 4, "experts": "squared relu", "packed": True}, cp=2, exchange="p2p", ep=2),
        _case("falcon h1", {"tied": True, "dropout": True}, tp=2, shard=2, accumulation=2),
        _case("falcon h1", {"layers": 4, "micro_batch": 1, "packed": True}, schedule="zb-v", **pipeline),
        _case("falcon h1", {"layers": 4, "micro_batch": 1}, schedule="interleaved", tp=2, sp=True, **pipeline),
        _case("falcon h1", {}, cp=2, exchange="a2a", recompute="full"),
        _case("falcon h1", {"packed": True, "length": 160}, cp=4, exchange="all_gather"),
        _case("falcon h1", {"packed": True}, shard=2, replicate=2, recompute="full"),
        _case("delta net and attention", {"packed": True}, cp=2, exchange="a2a", tp=2, sp=True),
        _case("delta net and attention", {"packed": True}, cp=2, exchange="p2p", recompute="selective"),
        # pieces of two tokens are fewer than the convolution looks back
        _case("delta net and attention", {}, cp=4, exchange="p2p"),
        _case("olmo hybrid", {"packed": True}, cp=2, exchange="p2p"),
        _case("olmo hybrid", {"packed": True}, cp=2, exchange="a2a", tp=2, sp=True),
        _case("olmo hybrid", {"layers": 4, "micro_batch": 1, "packed": True}, schedule="zb-v", **pipeline),
        _case("olmo hybrid", {"experts": "qwen2", "clip": True}, shard=2, ep=2, recompute="full"),
        _case("kimi", {"kv_heads": 4, "clip": True}, tp=4, sp=True, recompute="full"),
        _case("kimi", {"kv_heads": 4, "tied": True}, tp=2, shard=2, accumulation=2),
        _case("kimi", {"kv_heads": 4, "layers": 4, "micro_batch": 1, "packed": True}, schedule="zb-v", **pipeline),
        _case("kimi", {"kv_heads": 4, "layers": 4, "micro_batch": 1}, schedule="zb-h1", tp=2, sp=True, **pipeline),
        _case("kimi", {"kv_heads": 4, "length": 70, "packed": True}, tp=2, sp=True),
        _case("kimi", {"kv_heads": 4, "packed": True}, cp=2, exchange="a2a", tp=2, sp=True, shard=2),
        _case("kimi", {"kv_heads": 4}, cp=2, exchange="p2p", recompute="selective"),
        _case("kimi", {"kv_heads": 4, "packed": True, "length": 160}, cp=4, exchange="all_gather"),
        _case("kimi", {"kv_heads": 4, "experts": "sigmoid"}, tp=2, sp=True, shard=2, ep=2),
        _case("opt", {"dropout": True, "tied": True}, tp=2, sp=True, shard=2),
        _case("opt", {}, cp=2, exchange="p2p"),
        _case("bloom", {"packed": True, "kv_heads": 4}, tp=2, sp=True, recompute="full"),
        _case("bloom", {"micro_batch": 1}, schedule="1f1b", **pipeline),
    ]


def compiled_cases() -> list[Case]:
    """Under ``--compile``."""
    return [
        _case("gemma", {"tied": True}, tp=2, sp=True, compile=True),
        _case("command", {}, shard=2, compile=True),
        _case("bloom", {"kv_heads": 4}, compile=True),
        _case("hybrid", {"packed": True}, tp=2, sp=True, compile=True, recompute="selective"),
        _case("nemotron", {"packed": True, "layers": 4}, tp=2, sp=True, compile=True, recompute="selective"),
        _case("one group", {}, tp=2, compile=True),
        _case("falcon h1", {"packed": True}, tp=2, sp=True, compile=True, recompute="selective"),
        _case("kimi", {"kv_heads": 4, "packed": True}, tp=2, sp=True, compile=True, recompute="selective"),
    ]


def bf16_cases() -> list[Case]:
    """In bf16, split so that sums round in another order. Replicas alone do not: each takes one of one rank's
    micro-batches, and a sum of two gradients has the same bits in both orders."""
    return [
        _case("gemma", {"steps": 4}, tp=2, sp=True, bf16=True),
        _case("command", {"steps": 4}, tp=2, shard=2, bf16=True),
        _case("hybrid", {"steps": 4}, tp=2, sp=True, bf16=True),
        _case("mamba", {"steps": 4}, tp=2, sp=True, bf16=True),
        _case("kimi", {"kv_heads": 4, "steps": 4}, tp=2, sp=True, bf16=True),
    ]
