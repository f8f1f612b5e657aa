"""Mllama (Llama 3.2 Vision): each sample of a batch computed as if it were alone.

A token in front of its sample's images has a row of zeros in transformers' mask, which there means that it attends to
every image of the row. In a batch a row also has the images that pad it to the longest row's number, and a sample
without images has nothing but those, where by itself it goes around the layers of cross-attention. So losses and
gradients of such tokens depend on what else is in the batch. Here these rows see the sample's own images, which is
what transformers computes of the sample alone, or nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smp.models.foreign import reads_apart
from smp.models.micro_batch import MicroBatch

MASK = "cross_attention_mask"


def attends_across(module: Any) -> bool:
    """Whether layers of the decoder attend to images apart from the tokens. Those of a decoder after an encoder of
    texts (T5Gemma) have the same name."""
    return not reads_apart(module) and any(hasattr(layer, "cross_attn") for layer in module.modules())


def keep_apart(module: Any) -> None:
    """Make cross-attention of ``module`` give each sample of a batch what it gives to it alone."""
    if not attends_across(module):
        return
    tiles = module.config.vision_config.max_num_tiles
    decoder = module.get_decoder()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # transformers' own mask: 0 for tokens without images in front.
        seen = kwargs["full_text_row_masked_out_mask"] > 0
        # Keys: images x tiles x patches.
        images = kwargs[MASK].shape[-1] // (tiles * module.base_model.vision_model.num_patches)
        return args, kwargs | {MASK: own_images(kwargs[MASK], seen, images)}

    decoder.register_forward_pre_hook(before, with_kwargs=True)
    for layer in decoder.layers:
        if hasattr(layer, "cross_attn"):
            layer.cross_attn.register_forward_hook(_nothing_of_nothing, with_kwargs=True)


def own_images(mask: torch.Tensor, seen: torch.Tensor, images: int) -> torch.Tensor:
    """A mask in which rows without an image in front of them see all images of their sample, or nothing where it has
    none.

    Args:
        mask: (samples, 1, tokens, keys), 0 or the least number of its type, which is added to scores; keys are of
            images, one after the other.
        seen: (samples, 1, tokens, 1), whether a token has images in front of it.
        images: that the keys are of.
    """
    least = torch.finfo(mask.dtype).min
    of_image = ((mask == 0) & seen).unflatten(-1, (images, -1)).any(-1).any(2, keepdim=True)  # samples, 1, 1, images
    own = of_image.repeat_interleave(mask.shape[-1] // images, -1)
    return torch.where(seen, mask, torch.zeros_like(mask).masked_fill(~own, least))


def _nothing_of_nothing(_: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward hook: a token that sees no key gets zeros, where a softmax of equal scores would give it the mean of all
    values."""
    mask = kwargs["attention_mask"]
    # [samples, tokens]
    sees = (mask > torch.finfo(mask.dtype).min).any(-1).squeeze(1)
    return output[0] * sees[..., None], *output[1:]


def hide_filler(arguments: dict[str, Any], batch: MicroBatch) -> None:
    """Let no token see the filler image, which stands in where no text has one."""
    if batch.images is not None and batch.images.filler is not None and MASK in arguments:
        arguments[MASK] = torch.zeros_like(arguments[MASK])
