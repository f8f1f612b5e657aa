"""The reinforcement-learning kind of run: prompts instead of samples, and batches that the model writes."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smp.config import Config, ConfigError
from smp.config.rules.online import reward_names, reward_weights
from smp.convert.huggingface.folder import end_ids
from smp.data.build import Datasets
from smp.data.loader import BatchLoader
from smp.data.tuning.build import PromptData, chat_template_of
from smp.data.tuning.encode import Encoder
from smp.data.tuning.prompts import PromptDataset, prompts_fingerprint
from smp.generation import Sampling, Stops
from smp.kernels import Kernels
from smp.parallel.agree import any_rank, gather, on_all_or_none
from smp.parallel.context import ParallelContext
from smp.parallel.rng import stable_hash
from smp.rewards.environment_pool import EnvironmentPool
from smp.rewards.functions import RewardError
from smp.rewards.pool import RewardPool
from smp.training.build import RunSetup, build_generator, choose_backends
from smp.training.kind import BatchSource, Kept, Say, Trainable
from smp.training.objectives.contract import Reference
from smp.training.objectives.reference import FollowingReference, ModelReference
from smp.training.rollouts.engines.build import build_engine
from smp.training.rollouts.engines.engine import RolloutEngine
from smp.training.rollouts.episodes import Episodes
from smp.training.rollouts.rollout import Cut
from smp.training.rollouts.scoring import RewardModel, build_reward_model
from smp.training.rollouts.source import RolloutSource, mean_reward
from smp.training.rollouts.writing import Writing
from smp.training.texts.text_model import folder_of
from smp.training.trainer import Trainer
from smp.training.tuning.finetuning import Finetuning, data_flags, trims
from smp.training.tuning.settings import reward_model_config, tokenizer_of


class Reinforcement(Finetuning):
    """Trains the model in --load on completions that it writes, weighted by their rewards.

    Raises:
        ConfigError: see :class:`Finetuning`; or a reward function cannot be found.
    """

    prompts: PromptData

    def __init__(self, config: Config, data: PromptData) -> None:
        super().__init__(config, data)
        self.prompts = data
        self._writing: Writing | None = None
        self._engine: RolloutEngine | None = None
        self._pool: RewardPool | None = None
        self._environments: EnvironmentPool | None = None
        self._following: FollowingReference | None = None

    def close(self) -> None:
        for held in (self._pool, self._environments, self._engine):
            if held is not None:
                held.close()

    def datasets(self) -> Datasets:
        config, data = self.config, self.prompts
        # Without the prompts of validation files: the order of training must not depend on them, as
        # a resume compares it.
        own = data.prompts[: data.own]
        train = PromptDataset(own, data.train, seed=config.training.seed, each=data.each, notes=data.lines)
        valid = PromptDataset(data.prompts, data.valid, seed=None) if len(data.valid) else None
        here = prompts_fingerprint(data.prompts)
        # Every rank reads the files itself: other prompts on one would train unnoticed.
        if any(there != here for there in gather(here)):
            raise ConfigError(
                f"{data_flags(config)}: the processes do not read the same prompts: the files differ between nodes"
            )
        return Datasets(train, valid, None)  # type: ignore[arg-type]

    def kernels(self, context: ParallelContext, device: torch.device) -> tuple[Kernels, list[str]]:
        assert self.config.data.seq_length is not None
        shorter = (1, max(self.config.data.seq_length - 1, 1)) if trims(self.config) else ()
        return choose_backends(self.config, context, device, documents=False, other_lengths=shorter)

    def trainable(self, setup: RunSetup, say: Say, progress: Callable[[], None]) -> Trainable:
        made, rollouts = super().trainable(setup, say, progress), self.config.rollouts
        assert rollouts is not None, "settings of a fine-tuning run"
        specs = shlex.split(rollouts.reward_funcs or "")
        size = rollouts.generation_batch_size
        self._engine, lines = build_engine(
            self.config, setup, made.model, lambda: build_generator(self.config, setup, made.model, batch_size=size)
        )
        for line in lines:
            say(line)
        calls = self._engine.share.leads  # one rank of those that write the same texts

        def start() -> RewardPool | None:
            if not (calls and specs):
                return None
            try:
                return RewardPool(specs, rollouts.reward_workers, rollouts.reward_timeout)
            except (RewardError, OSError) as error:
                raise ConfigError(str(error)) from None

        # Together: reward functions may fail to import on one rank only.
        self._pool = on_all_or_none(start, ConfigError, "--reward-funcs")
        tokenizer, seed = self.prompts.tokenizer, self.config.training.seed
        self._writing = Writing(
            engine=self._engine,
            tokenizer=tokenizer,
            pool=self._pool,
            sampling=Sampling(rollouts.temperature, rollouts.top_k, rollouts.top_p, seed),
            stops=Stops(frozenset({*end_ids(folder_of(self.config)), tokenizer.eos})),
            longest=rollouts.max_completion_length,
            functions=len(specs),
            episodes=self._episodes(self._engine, progress),
            scorer=self._reward_model(setup, say),
            skips=rollouts.reward_errors == "skip",
            progress=progress,
        )
        say(f"rewards: {', '.join(reward_names(rollouts))}")
        if rollouts.sync_ref_model:  # before a checkpoint is loaded, which has it
            assert self._models is not None
            copy = self._models.reference()
            assert isinstance(copy, ModelReference), "checked with the settings"
            alpha, steps = rollouts.ref_model_mixup_alpha, rollouts.ref_model_sync_steps
            self._following = FollowingReference(copy, made.model, alpha, steps)
        return made

    def kept(self) -> Kept:
        following = self._following
        return Kept() if following is None else Kept(following.state, following.logical_rows)

    def _episodes(self, engine: RolloutEngine, progress: Callable[[], None]) -> Episodes | None:
        """The environments of --environment; None: it is not given."""
        rollouts, calls, vocab_size = self.config.rollouts, engine.share.leads, self.config.model.vocab_size
        assert rollouts is not None
        if (spec := rollouts.environment) is None:
            return None
        assert vocab_size is not None, "resolved before"
        texts = sum(not prompt.is_chat for prompt in self.prompts.prompts)
        if texts:
            raise ConfigError(
                f"--environment {spec} answers conversations, and {texts} prompts are texts: give messages"
            )

        def start() -> EnvironmentPool | None:
            try:
                return EnvironmentPool(spec, rollouts.reward_workers, rollouts.reward_timeout) if calls else None
            except (RewardError, OSError) as error:
                raise ConfigError(str(error)) from None

        self._environments = on_all_or_none(start, ConfigError, "--environment")
        tokenizer = self.prompts.tokenizer
        encoder = Encoder(tokenizer, chat_template_of(self.config.data.chat_template, tokenizer))
        skips = rollouts.reward_errors == "skip"
        return Episodes(engine, vocab_size, self._environments, encoder, rollouts.max_turns, skips, progress)

    def _reward_model(self, setup: RunSetup, say: Say) -> RewardModel | None:
        """The reward model of --reward-model; None: it is not given."""
        context, rollouts = setup.context, self.config.rollouts
        if rollouts is None or rollouts.reward_model is None:
            return None
        config = reward_model_config(self.config, context.world_size)
        tokenizer = tokenizer_of(config)
        encoder = Encoder(tokenizer, chat_template_of(None, tokenizer))
        made, lines = build_reward_model(config, encoder, setup, trims(config))
        for line in lines:
            say(line)
        return made

    def batches(
        self, setup: RunSetup, dataset: PromptDataset, consumed: int, carried: Mapping[str, torch.Tensor], say: Say
    ) -> BatchSource:
        config, data, context = self.config, self.config.data, setup.context
        assert self._writing is not None and self._models is not None and config.rollouts is not None, "built before"
        assert data.seq_length is not None and data.global_batch_size is not None, "resolved before"
        temperature = config.rollouts.temperature
        reference: Reference | None = None
        if self._following is not None:
            reference = self._following.reference
        elif config.has_reference:
            reference = self._models.reference()
        assert reference is None or isinstance(reference, ModelReference), "checked with the settings"
        return RolloutSource(
            config,
            context,
            dataset,
            self._writing,
            Cut(
                data.global_batch_size,
                data.micro_batch_size,
                context.data_rank,
                context.data_size,
                data.seq_length,
                trims(config),
            ),
            # Completions are drawn at this temperature, so log-probabilities are compared at it.
            dataclasses.replace(self._models.policy(), temperature=temperature),
            None if reference is None else dataclasses.replace(reference, temperature=temperature),
            consumed,
            carried,
            say,
            self._following,
        )

    def evaluate(
        self, trainer: Trainer, dataset: PromptDataset, read: Callable[[Any], BatchLoader], stopped: Callable[[], bool]
    ) -> float | None:
        """Minus the mean reward of completions of validation prompts: of --eval-iters global batches of them, or of
        all."""
        rollouts, training = self.config.rollouts, self.config.training
        assert rollouts is not None and self._writing is not None and rollouts.num_generations_eval is not None
        assert rollouts.eval_temperature is not None and self.config.data.global_batch_size is not None
        if any_rank(stopped()):
            return None
        each = rollouts.num_generations_eval
        prompts = min(len(dataset), max(1, training.eval_iters * self.config.data.global_batch_size // each))
        # A seed of its own: evaluations draw the same texts at every iteration. ``>> 1``: a
        # positive int64.
        writing = self._writing.evaluating(rollouts.eval_temperature, stable_hash(training.seed, "evaluation") >> 1)
        return -mean_reward(writing, dataset, prompts, each, reward_weights(rollouts))
