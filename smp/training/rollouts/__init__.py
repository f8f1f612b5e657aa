"""Reinforcement learning's batches: the model writes completions, they are rewarded, and become micro-batches.

==========  =======================================================================================
file        what
==========  =======================================================================================
source      the batches of a run, step by step; begin here
writing     completions of some prompts with their rewards, on all ranks
advantages  from rewards to what each completion's gradient is weighted by
rollout     the completions of one generation, whole on every rank, and what is known of them
engines     who writes: the layers that train, or another program
==========  =======================================================================================

The losses are in ``smp.training.objectives.policy``, reward functions in ``smp.rewards``, sampling in
``smp.generation``. Every rank has all completions of a generation (tokens and log-probabilities, in host memory): so
means over prompts are whole, batches are cut as those of files are, and a checkpoint has them in no layout.
"""
