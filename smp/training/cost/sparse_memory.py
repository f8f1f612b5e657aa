"""Numbers and bytes per token of DeepSeek's sparse attention, by formula, without torch."""

from __future__ import annotations

from smp.config import Config, Layout, ModelConfig
from smp.config.rules.dsa import chooses_keys, indexer_coefficient


def is_sparse(config: Config) -> bool:
    """Whether attention is to chosen keys: sequences are longer than top-k, and it is not the warm-up."""
    model, length = config.model, config.data.seq_length
    assert length is not None, "resolved before"
    return chooses_keys(model) and not model.dsa_indexer_warmup and length > model.dsa_indexer_topk


def kept_by_sparse(model: ModelConfig, layout: Layout, heads: int, split: int, recompute: str) -> int:
    """Elements per token of attention to chosen keys, instead of :func:`smp.training.cost.kept_memory._latent`:
    queries; of each head the query and the result in the latents' space; the results; the table of latents of all
    context-parallel ranks; latents, and their norms' results. selective: the same without these; the queries are kept
    as the product makes them, too."""
    key, rank = model.qk_head_dim + model.qk_pos_emb_head_dim, model.kv_lora_rank
    low, table = rank + (model.q_lora_rank or 0), layout.cp * (rank + model.qk_pos_emb_head_dim)
    of_heads = heads * (key + 2 * rank + model.v_head_dim)
    if recompute == "selective":
        return of_heads + (low + model.qk_pos_emb_head_dim) // split
    return of_heads + heads * model.qk_pos_emb_head_dim + table + low * 2 // split


def kept_by_indexer(config: Config, layout: Layout, b: int, split: int, recompute: str) -> int:
    """Bytes per token: the chosen keys' numbers, and where the indexer is trained the gradients that its loss has made,
    and its norm's input. selective: also results of its products, and probabilities summed over heads, in fp32."""
    model, chosen = config.model, 0
    if is_sparse(config):
        # int32 indices of the chosen keys; with selective recompute also their fp32 probabilities.
        chosen = 4 * model.dsa_indexer_topk * (2 if recompute == "selective" else 1)
    queries, width = model.dsa_indexer_n_heads * (model.dsa_indexer_head_dim + 1), model.dsa_indexer_head_dim
    products = (queries + width) // split
    if recompute == "selective":
        chosen += b * products
    if not indexer_coefficient(model) or config.has_adapters:
        return chosen
    made = queries // split + layout.cp * width
    return b * (made + (0 if recompute == "selective" else width // split)) + chosen


def in_flight_of_sparse(model: ModelConfig, layout: Layout, b: int, heads: int) -> int:
    """Bytes per token in its backward pass: gradients of the results, of the queries in the latents' space and of the
    results there, and of the table, in fp32."""
    rank, rotated = model.kv_lora_rank, model.qk_pos_emb_head_dim
    return b * heads * (model.v_head_dim + 2 * rank + rotated) + 4 * layout.cp * (rank + rotated)
