"""Completions by vLLM in the processes of the run, on their devices (TRL's ``vllm_mode="colocate"``).

Each process has an engine, or a part of one that --vllm-tensor-parallel-size processes share: vLLM's external launcher.
It begins with weights that mean nothing and gets those of the model before each generation, tensor by tensor, through
the ``load_weights`` of its model, which cuts and fuses them as it does those of files. That does not repeat what vLLM
made of the first weights when it started (``process_weights_after_loading``), which swaps halves of experts' matrices:
models with experts are refused (``smp.config.rules.online``).

Written for vLLM 0.33 (``vllm.LLM``, ``SamplingParams``, ``apply_model``, ``reset_prefix_cache``). It was not run with
vLLM itself, which needs a GPU; ``tests/training/test_rollout_engines.py`` runs it with a stand-in of that interface.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from smp.generation import Completion, Request, Sampling, Stops


class VllmSampler:
    """``vllm.LLM`` on the architecture of the model.

    Args:
        content: config.json of the model.
        dtype: of its weights.
        longest: tokens of a prompt with its completion.
        batch_size: texts that are written at once.
        memory: share of the device's memory for weights and cache.
        tensor_parallel: processes that share an engine.
        seed: of those that share one the same.
        temperature: at which completions are drawn that are trained on.

    Attributes:
        name: as --rollout-engine has it.
    """

    name = "vllm"

    def __init__(
        self,
        content: Mapping[str, Any],
        dtype: torch.dtype,
        *,
        longest: int,
        batch_size: int,
        memory: float,
        tensor_parallel: int,
        seed: int,
        temperature: float,
    ) -> None:
        import vllm

        self._params = vllm.SamplingParams
        with TemporaryDirectory() as folder, _launched():
            (Path(folder) / "config.json").write_text(json.dumps(dict(content)))
            self._llm: Any = vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                # Random weights: the trainer's come before the first text.
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=memory,
                max_model_len=longest,
                max_num_seqs=batch_size,
                seed=seed,
                # Behind temperature, top-k and top-p, or before all of them. Of temperature 1 without cuts both are
                # the same; with cuts the log-probabilities of all tokens are the second.
                logprobs_mode="raw_logprobs" if temperature == 1.0 else "processed_logprobs",
            )

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._llm.apply_model(lambda model, name=name, tensor=tensor: model.load_weights([(name, tensor)]))
        # Cached keys and values of prompts are of the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM's reset_prefix_cache refused: texts would begin with keys of older weights")

    def sample(self, requests: Sequence[Request], sampling: Sampling, stops: Stops) -> list[Completion]:
        prompts = [{"prompt_token_ids": [*request.prompt, *request.written]} for request in requests]
        params = [self._params(**_params(request, sampling, stops)) for request in requests]
        answers = self._llm.generate(prompts, params, use_tqdm=False)
        return [_completion(request, answer.outputs[0]) for request, answer in zip(requests, answers, strict=True)]

    def close(self) -> None:
        self._llm = None


@contextmanager
def _launched() -> Iterator[None]:
    """Context manager: the variables that vLLM's external launcher reads. Without torchrun the run is one process."""
    added = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    added = {name: value for name, value in added.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _params(request: Request, sampling: Sampling, stops: Stops) -> dict[str, Any]:
    # A seed of its own for each text: what it is does not depend on the others of a batch.
    seed = sampling.key(request.index, request.sample) + len(request.written)
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": seed & ((1 << 63) - 1),
        "max_tokens": request.max_new_tokens - len(request.written),
        "ignore_eos": True,  # what ends a text is said here
        "stop_token_ids": sorted(stops.ids),
        "logprobs": 0,  # of the token that was drawn, alone
        "detokenize": False,
    }


def _completion(request: Request, answer: Any) -> Completion:
    ids = list(answer.token_ids)
    # By the id: of several in a dictionary the first may be another token's.
    log_probs = [float(of[token].logprob) for of, token in zip(answer.logprobs, ids, strict=True)]
    cut = answer.finish_reason == "length"
    return Completion(request, [*request.written, *ids], log_probs, "length" if cut else "end")
