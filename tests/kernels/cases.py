"""Inputs for every kernel, nice and nasty, and the two backends' results on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from smp.kernels import cross_entropy, norm, rope, swiglu
from smp.kernels.experts import grouped, permute, router

Results = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> what a backend gives, what the reference gives

# rows, columns, real columns. No rows; rows of one element, of no power of two, of many blocks; ranks with nothing but
# padding. In the first of several rows all logits are minus infinity.
# What all logits have in common comes last: it must not show.
VOCABULARIES = [
    (0, 7, 7, 0.0),
    (1, 7, 7, 0.0),
    (5, 123, 120, 0.0),
    (3, 5000, 4999, 0.0),
    (4, 4096, 4096, 0.0),
    (2, 151_936, 151_936, 0.0),
    (2, 16, 0, 0.0),
    *((4, 500, 499, offset) for offset in (1e3, -1e4, 1e5)),
]
NORMS = [(0, 8), (1, 8), (7, 123), (40, 16), (5, 128), (3, 5000)]  # rows, features
MLPS = [(0, 8), (1, 8), (7, 123), (3, 2500)]  # rows, width
# tokens, query heads, key heads, width, rotated
HEADS = [(0, 2, 1, 4, 4), (1, 1, 1, 2, 2), (5, 6, 2, 20, 12), (3, 20, 4, 128, 128)]
# tokens, experts, experts of a token: all of them, no power of two, more experts than threads, several programs
ROUTERS = [(0, 4, 2), (1, 8, 1), (3, 4, 4), (7, 123, 6), (40, 64, 8), (300, 8, 2), (2, 1500, 5)]

# tokens, width, experts of a token out of 8: no tokens, one expert each, narrower than a block, two and a bit, two
PERMUTES = [(0, 8, 2), (6, 40, 1), (7, 123, 3), (5, 2100, 2), (3, 2048, 6)]

# rows of each expert, columns, rows of its matrix: no rows, without and with some, several tiles each way, unequal,
# as many as programs and more, one expert, sizes that no power of two divides
EXPERTS = [
    ([0, 0, 0], 8, 16),
    ([3, 0, 33, 64, 100], 48, 40),
    ([0, 0, 150, 0, 1], 70, 131),
    ([1, 128, 0, 65, 2, 7, 0], 129, 24),
    ([77], 16, 260),
]


def draw(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def cross_entropies(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    for rows, width, valid, offset in VOCABULARIES:
        logits = 5 * draw(rows, width, dtype=dtype, device=device, seed=0) + offset
        logits[: int(rows > 1)] = -torch.inf
        generator = torch.Generator().manual_seed(1)
        columns = torch.randint(-1, valid + 2, (rows,), generator=generator).to(device)
        weights = torch.rand(rows, generator=generator).to(device)
        got, want = (cross_entropy.softmax_stats(logits, columns, valid, b) for b in (backend, "torch"))
        total, got, want = (x.nan_to_num(neginf=0.0) for x in (want, got, want))
        both: Results = {n: (got[i], want[i]) for i, n in ((0, "largest logit"), (2, "target"))}
        both["log sum exp"] = got[0] + got[1], want[0] + want[1]
        both["sum beside the largest"] = got[1].exp(), want[1].exp()  # which an offset of all logits hides in the above
        for name, weight in (("some ignored", weights * (weights > 0.5)), ("all ignored", 0 * weights)):
            got, want = (
                cross_entropy.logits_to_gradient(logits.clone(), total, columns, valid, weight, b)
                for b in (backend, "torch")
            )
            both[f"gradient, {name}"] = got, want
        yield f"{rows} x {width}, {valid} real, at {offset:g}", both


def norms(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    for rows, features in NORMS:
        x, added, dy, dtotal = (draw(rows, features, dtype=dtype, device=device, seed=i) for i in range(4))
        weight, shift = (1 + draw(features, dtype=dtype, device=device, seed=i) for i in (4, 5))
        for adds in (False, True):
            for bias in (None, shift):
                residual, dsum = (added, dtotal) if adds else (None, None)
                _, total, mean, scale = want = norm.forward_reference(x, residual, weight, bias, 1e-5)
                got = norm._forward_op(x, residual, weight, bias, 1e-5, backend)
                saved = (total if adds else x, weight, mean, scale, bias is not None)
                want += norm.backward_reference(dy, dsum, *saved)
                got += norm._backward_op(dy, dsum, *saved, backend)
                names = ("y", "sum", "mean", "scale", "dx", "dweight", "dbias")
                title = f"{rows} x {features}{', after addition' * adds}{', LayerNorm' * (bias is not None)}"
                yield title, {n: (g, w) for n, g, w in zip(names, got, want, strict=True)}


def swiglus(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    for rows, width in MLPS:
        fused, da = (
            draw(rows, 2 * width, dtype=dtype, device=device, seed=0),
            draw(rows, width, dtype=dtype, device=device, seed=1),
        )
        halves = fused.chunk(2, dim=1)  # views, not copies: the kernel takes their stride
        got, want = (
            (
                swiglu.FusedSwiglu(b).forward(*halves),
                *swiglu.FusedSwiglu(b).backward(da, *halves, again=True),
                *swiglu.FusedSwiglu(b).backward(da, *halves)[:2],
            )
            for b in (backend, "torch")
        )
        names = ("a", "dgate", "dup", "a again", "dgate alone", "dup alone")
        yield f"{rows} x {width}", {n: (g, w) for n, g, w in zip(names, got, want, strict=True)}


def ropes(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    for tokens, query_heads, key_heads, width, rotated in HEADS:
        q = draw(tokens, query_heads, width, dtype=dtype, device=device, seed=0)
        k = draw(tokens, key_heads, width, dtype=dtype, device=device, seed=1)
        angle = draw(tokens, 1, rotated // 2, dtype=torch.float32, device=device, seed=2)
        angle = torch.cat((angle, angle), dim=-1)
        table = angle.cos(), angle.sin()
        both: Results = {}
        for inverse in (False, True):
            got, want = (rope._rope_op(q, k, *table, inverse, b) for b in (backend, "torch"))
            in_place = q.clone(), k.clone()
            rope._rope_in_place_op(*in_place, *table, inverse, backend)
            way = "back" if inverse else "forth"
            for i, name in enumerate("qk"):
                both[f"{name} {way}"] = got[i], want[i]
                both[f"{name} {way}, in place"] = in_place[i], want[i]
        yield f"{tokens} tokens, {query_heads} + {key_heads} heads of {width}, {rotated} rotated", both


def routers(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    for tokens, experts, k in ROUTERS:
        logits = 3 * draw(tokens, experts, dtype=dtype, device=device, seed=0)
        logits[1:3] = 0.0  # all are equal
        logits[2:3, ::2] = 100.0  # half of them, and their sigmoids are 1
        dweights = draw(tokens, k, dtype=dtype, device=device, seed=1)
        shift = 0.2 * draw(experts, dtype=torch.float32, device=device, seed=2)
        other = draw(tokens, experts, dtype=torch.float32, device=device, seed=3)
        other[:, (experts + 1) // 2 :] = -torch.inf  # of which some are chosen where the finite ones are too few
        scores: tuple[router.Scores, ...] = ("softmax", "pre_softmax", "sigmoid")
        for kind in scores:
            for name, compared, bias in (("", None, None), (", bias", None, shift), (", compared", other, None)):
                given = logits, compared, bias, k, kind, 2.5
                got, want = (router._forward_op(*given, b) for b in (backend, "torch"))
                got += (router._backward_op(dweights, logits, want[0], kind, 2.5, backend),)
                want += (router._backward_op(dweights, logits, want[0], kind, 2.5, "torch"),)
                names = ("experts", "weights", "dlogits")
                title = f"{tokens} x {experts}, {k} each, {kind}{name}"
                yield title, {n: (g, w) for n, g, w in zip(names, got, want, strict=True)}


def sorted_choices(tokens: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, inverse) of choices that are drawn; all of the same expert; or a third of them dropped, whose row is the
    last one (see ``smp.layers.moe.dispatch``)."""
    chosen = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(5)).argsort(1)[:, :k].flatten()
    if kind == "one expert":
        chosen = torch.zeros_like(chosen)
    dropped = (torch.arange(len(chosen)) % 3 == 1) & (kind == "dropped")
    order = chosen.masked_fill(dropped, 8).argsort(stable=True)
    inverse = order.argsort()
    if kind == "dropped" and tokens:
        rows = int((~dropped).sum())
        order, inverse = torch.cat((order[:rows], order[:1])), inverse.clamp(max=rows)
    return order, inverse


def permutes(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    """Beside the definitions in fp64."""
    for tokens, width, k in PERMUTES:
        for kind in ("drawn", "one expert", "dropped"):
            order, inverse = (x.to(device) for x in sorted_choices(tokens, k, kind))
            x, dy = (draw(tokens, width, dtype=dtype, device=device, seed=i) for i in range(2))
            rows, drows = (draw(len(order), width, dtype=dtype, device=device, seed=i) for i in (2, 3))
            weights = draw(tokens, k, dtype=torch.float32, device=device, seed=4)
            if kind == "dropped":
                rows[-1:] = 0.0
            leaves = [t.requires_grad_() for t in (x, rows, weights)]
            sent = permute.repeat_rows(x, order, inverse, k, backend)
            back = permute.combine_rows(rows, weights, order, inverse, backend)
            got = sent, back, *torch.autograd.grad((sent, back), leaves, (drows, dy))
            x64, rows64, weights64 = (t.detach().double() for t in leaves)
            choices = inverse.view(tokens, k)
            exact = [
                x64[order // k],
                (weights64[:, :, None] * rows64[choices]).sum(1),
                drows.double()[choices].sum(1),
                weights64.flatten()[order][:, None] * dy.double()[order // k],
                (rows64[choices] * dy.double()[:, None]).sum(-1),
            ]
            names = ("rows", "sum", "dx", "drows", "dweights")
            want = (e.to(g.dtype) for e, g in zip(exact, got, strict=True))
            title = f"{tokens} x {width}, {k} each, {kind}"
            yield title, {n: (g.detach(), w) for n, g, w in zip(names, got, want, strict=True)}


def products_of_experts(dtype: torch.dtype, backend: str, device: str = "cpu") -> Iterator[tuple[str, Results]]:
    """Beside the definitions in fp64. Rows behind the last expert's are not read: they are not numbers."""
    for rows, columns, height in EXPERTS:
        n, counts = sum(rows), torch.tensor(rows, device=device)
        x = draw(n + 5, columns, dtype=dtype, device=device, seed=0)
        grads = [draw(n + 5, height, dtype=dtype, device=device, seed=i) for i in (1, 2)]
        weights = [draw(len(rows), height, columns, dtype=dtype, device=device, seed=i) for i in (3, 4)]
        for behind in (x, *grads):
            behind[n:] = torch.nan
        got = (
            grouped._forward_op(x, weights[0], counts, backend)[:n],
            grouped._input_gradient_op(grads[:1], weights[:1], counts, backend)[:n],
            grouped._input_gradient_op(grads, weights, counts, backend)[:n],
            grouped._weight_gradient_op(grads[0], x, counts, backend),
        )
        parts = [[part.double() for part in t[:n].split(rows)] for t in (x, *grads)]
        of_expert = list(zip(*parts, *(w.double() for w in weights), strict=True))
        exact = (
            torch.cat([own @ w.t() for own, _, _, w, _ in of_expert]),
            torch.cat([g @ w for _, g, _, w, _ in of_expert]),
            torch.cat([g @ w + h @ v for _, g, h, w, v in of_expert]),
            torch.stack([g.t() @ own for own, g, _, _, _ in of_expert]),
        )
        names = ("y", "dx", "dx of two", "dw")
        want = (e.to(g.dtype) for e, g in zip(exact, got, strict=True))
        title = f"rows {rows}, {columns} -> {height}"
        yield title, {name: (g, w) for name, g, w in zip(names, got, want, strict=True)}


OPERATIONS = {
    **{"cross_entropy": cross_entropies, "norm": norms, "swiglu": swiglus, "rope": ropes, "router": routers},
    **{"permute": permutes, "grouped_gemm": products_of_experts},
}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; where want is zero the largest element. NaN is infinite."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    distance, size = (got.double() - want.double()).norm().item(), want.double().norm().item()
    value = distance / size if size else distance
    return value if value == value else float("inf")
