"""Engines that write completions: the layers that train, or another program's engine with their weights.

====================  ==================================================================
file                  what
====================  ==================================================================
engine                what an engine is, and the two kinds of them; begin here
live_weights          the weights of the model that trains, in Hugging Face's names
transformers_sampler  transformers' ``generate``
vllm_sampler          vLLM in the processes of the run
build                 what --rollout-engine names
====================  ==================================================================
"""
