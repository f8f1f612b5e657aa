"""Completions by transformers' ``generate``: an engine of another program that runs wherever torch does.

A model of transformers is made anew of each generation's weights. Its tokens are drawn by torch's generator, seeded for
each batch by the prompts in it: a resumed run writes the same texts in the same layout, another layout others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from smp.generation import Completion, Request, Sampling, Stops


class TransformersSampler:
    """``AutoModelForCausalLM`` of the weights that it is given.

    Args:
        content: config.json of the model.
        dtype, device: of it.
        batch_size: texts that are written at once.

    Attributes:
        name: as --rollout-engine has it.
    """

    name = "transformers"

    def __init__(self, content: Mapping[str, Any], dtype: torch.dtype, device: torch.device, batch_size: int) -> None:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        given = {key: value for key, value in content.items() if key != "model_type"}
        self._config = AutoConfig.for_model(content["model_type"], **given)
        # The model class itself: the Auto class looks for files.
        self._kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)]
        self._dtype, self._device, self._batch_size = dtype, device, batch_size
        self._model: Any = None

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        from transformers.utils import logging

        self._model = None  # first: its memory is for the next one
        # transformers warns of unexpected names and shows a progress bar at each load.
        shown, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            # A copy: the stream reuses the memory.
            tensors = {name: tensor.clone() for name, tensor in weights}
            options = {"config": self._config, "state_dict": tensors, "dtype": self._dtype}
            made, said = self._kind.from_pretrained(None, **options, output_loading_info=True)
        finally:
            logging.set_verbosity(shown)
            if bars:
                logging.enable_progress_bar()
        # Unexpected names are fine (a tied head, say), missing ones are not.
        wrong = sorted({*said["missing_keys"], *(str(key) for key in said["mismatched_keys"])})
        if wrong:
            raise ValueError(f"transformers' {type(made).__name__} wants other tensors: {', '.join(wrong[:3])}")
        self._model = made.to(self._device).eval()

    def sample(self, requests: Sequence[Request], sampling: Sampling, stops: Stops) -> list[Completion]:
        # Prompts are padded on the left: texts of similar length go together.
        order = sorted(requests, key=lambda request: -len(request.prompt) - len(request.written))
        parts = [order[i : i + self._batch_size] for i in range(0, len(order), self._batch_size)]
        return [text for part in parts for text in self._batch(part, sampling, stops)]

    @torch.no_grad()
    def _batch(self, requests: Sequence[Request], sampling: Sampling, stops: Stops) -> list[Completion]:
        from transformers import LogitsProcessorList, StoppingCriteriaList

        ids = [[*request.prompt, *request.written] for request in requests]
        length, room = max(map(len, ids)), [r.max_new_tokens - len(r.written) for r in requests]
        prompts = torch.tensor([[0] * (length - len(row)) + row for row in ids], device=self._device)
        seen = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in ids], device=self._device)
        noted = _LogProbs(sampling.temperature or 1.0)
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            drawn = {"do_sample": True, "temperature": sampling.temperature}
            drawn |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
        devices = [self._device] if self._device.type == "cuda" else []
        # The run's own random state stays as it is.
        with torch.random.fork_rng(devices):
            # Keyed by the first text of the batch: a resumed run draws the same.
            torch.manual_seed(sampling.key(requests[0].index, requests[0].sample) + len(requests[0].written))
            out = self._model.generate(
                prompts,
                attention_mask=seen,
                max_new_tokens=max(room),
                eos_token_id=sorted(stops.ids) or None,
                # Any id: what follows the end of a text is cut off.
                pad_token_id=0,
                logits_processor=LogitsProcessorList([noted.of_logits]),
                stopping_criteria=StoppingCriteriaList([noted.of_tokens]),
                **drawn,
            )
        # (rows, new tokens)
        new, log_probs = out[:, length:].tolist(), torch.stack(noted.found, 1).tolist()
        return [_cut(r, row, lp, n, stops) for r, row, lp, n in zip(requests, new, log_probs, room, strict=True)]

    def close(self) -> None:
        self._model = None


def _cut(request: Request, ids: list[int], log_probs: list[float], room: int, stops: Stops) -> Completion:
    """The completion in one row of a batch: to its first end token, or to its length."""
    end = next((i + 1 for i, token in enumerate(ids[:room]) if token in stops.ids), None)
    count = room if end is None else end
    return Completion(request, [*request.written, *ids[:count]], log_probs[:count], "length" if end is None else "end")


class _LogProbs:
    """Notes the log-probability of each drawn token, by the whole softmax of logits / temperature.

    ``generate`` calls ``of_logits`` before it cuts and draws (processors of the caller come before its own), and
    ``of_tokens`` when the token is there. So one row of logits is kept, and not those of all tokens.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature, self._last = temperature, torch.empty(0)
        self.found: list[torch.Tensor] = []

    def of_logits(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Before top-k and top-p: the trainer's log-probabilities are of all tokens.
        self._last = (scores.float() / self._temperature).log_softmax(-1)
        return scores

    def of_tokens(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.found.append(self._last.gather(1, input_ids[:, -1:])[:, 0])
        # False: it never stops a text, it only looks.
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
