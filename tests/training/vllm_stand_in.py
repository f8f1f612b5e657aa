"""As much of vLLM 0.33's interface as ``smp.training.rollouts.engines.vllm_sampler`` uses, on a CPU: ``vllm`` itself
needs a GPU. Arguments that vLLM does not have are errors; texts are drawn one by one, without a cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

made: list[dict[str, Any]] = []
"""Arguments of each engine."""
PER_CALL: list[int] = []
"""Texts that each call asked for."""


@dataclass
class SamplingParams:
    n: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]
    logprobs: int
    detokenize: bool


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool,
        load_format: str,
        dtype: str,
        tensor_parallel_size: int,
        distributed_executor_backend: str,
        gpu_memory_utilization: float,
        max_model_len: int,
        max_num_seqs: int,
        seed: int,
        logprobs_mode: str,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        assert load_format == "dummy" and skip_tokenizer_init and distributed_executor_backend == "external_launcher"
        # As vLLM's ExecutorWithExternalLauncher; a process group is there.
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        assert 0 <= local_rank <= rank < int(os.environ["WORLD_SIZE"]) and torch.distributed.is_initialized()
        made.append({"memory": gpu_memory_utilization, "ranks": tensor_parallel_size, "mode": logprobs_mode})
        kind = getattr(torch, dtype)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=kind).eval()
        self._model.load_weights = self._load_weights
        self._longest, self._raw, self._fresh = max_model_len, logprobs_mode == "raw_logprobs", False

    def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self._model.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)
        self._fresh = False
        return {name for name, _ in weights}

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self._model)]

    def reset_prefix_cache(self) -> bool:
        self._fresh = True
        return True

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, list[int]]], params: list[SamplingParams], *, use_tqdm: bool) -> Any:
        assert self._fresh and not use_tqdm, "a cache of older weights"
        PER_CALL.append(len(prompts))
        return [self._one(p["prompt_token_ids"], of) for p, of in zip(prompts, params, strict=True)]

    def _one(self, prompt: list[int], of: SamplingParams) -> Any:
        draw, ids, log_probs = torch.Generator().manual_seed(of.seed), list(prompt), []
        for _ in range(of.max_tokens):
            logits = self._model(torch.tensor([ids])).logits[0, -1].float()
            tempered = logits / of.temperature if of.temperature else logits
            probabilities = tempered.softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=draw)) if of.temperature else int(logits.argmax())
            said = (logits if self._raw else tempered).log_softmax(-1)[token].item()
            ids.append(token)
            # Of several the drawn one need not be the first.
            log_probs.append({token: SimpleNamespace(logprob=said)})
            if token in of.stop_token_ids:
                break
        assert len(ids) <= self._longest
        reason = "stop" if ids[-1] in of.stop_token_ids else "length"
        output = SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=log_probs, finish_reason=reason)
        return SimpleNamespace(outputs=[output])
