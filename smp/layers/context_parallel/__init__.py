"""Attention over sequences that are split over ranks. Each exchange is an attention core that wraps another one.

In your own module, on each rank of a 1-D ``mesh``, with ``q`` (tokens, heads, head_dim), ``k`` and ``v`` of this
rank's tokens::

    from smp.layers import DEFAULT_ATTENTION, AttentionSpec, TokenLayout, context_parallel_attention, cut_sequences

    cut = cut_sequences(batch, length, mesh.size(), document_ids)   # the same on every rank
    columns = cut.index(mesh.get_local_rank())                      # (batch, length / ranks): this rank's tokens
    x, positions = inputs.gather(1, columns), columns               # cut after labels are shifted
    layout = TokenLayout(batch, cut.local_length, cut=cut)
    attention = context_parallel_attention(DEFAULT_ATTENTION, mesh, "p2p")
    layout = attention.prepare(layout, [AttentionSpec()], q.dtype, q.device)   # once for all layers
    out, lse = attention(q, k, v, layout, AttentionSpec())

``smp.layers.SelfAttention`` takes the core as ``kernels=Kernels(attention=attention)``. Every rank has a part of the
loss and of each weight's gradient: their sums over ranks are those of whole sequences.

=============  =========================================================  ====================================
file           what                                                       knows process groups
=============  =========================================================  ====================================
blocks         which queries meet which keys, as calls of a core          no
partial        those calls, merged, and their gradients                   no
ring           p2p                                                        one, around the ring
gather         all_gather                                                 one
ulysses        a2a; around a ring a2a+p2p                                 one, of neighbours
cost, auto     bytes by formula; which exchange to use                    no
=============  =========================================================  ====================================
"""

from smp.layers.context_parallel.make_core import context_parallel_attention

__all__ = ["context_parallel_attention"]
