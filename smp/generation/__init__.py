"""Text from a decoder: many texts at once, in every layout, by the layers that train.

=========  ==========================================================
file       what
=========  ==========================================================
sampling   the next token of each text, of logits that ranks share
texts      what is asked for, what was written, when it ends
slots      which texts are in the cache, and what is computed next
equal      the same of a model with a cache of its own
stages     a forward pass through the stages of a pipeline
generator  puts them together; read it first
=========  ==========================================================
"""

from smp.generation.generator import Generator
from smp.generation.sampling import Sampling
from smp.generation.texts import Completion, Request, Stops

__all__ = ["Completion", "Generator", "Request", "Sampling", "Stops"]
