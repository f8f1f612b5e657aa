"""A tiny Hugging Face folder with everything that belongs to one, and samples for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, which many models use."""
WORDS = ["what is the answer to everything", "it is forty two of course", "one two three four five six seven"]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """A byte-level BPE of 300 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>"}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_pieces(path: Path) -> None:
    """A sentencepiece model of 300 pieces."""
    from tools.train_tokenizer import train

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(train(WORDS * 4, 300, "bpe", 0))


def write_model(
    folder: Path, kind: str = "llama", layers: int = 4, *, tied: bool = False, hidden: int = 32, positions: int = 64
) -> None:
    """Random weights, large enough that every part of the model shows in the loss."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "initializer_range": 0.15}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=2, **sizes
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    elif kind == "qwen2-moe":
        config = transformers.Qwen2MoeConfig(
            **{"hidden_size": 32, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
            **{"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "intermediate_size": 64},
            **{"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 2},
            **sizes,
        )
        model = transformers.Qwen2MoeForCausalLM(config)
    elif kind == "phi3":
        config = transformers.Phi3Config(
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "max_position_embeddings": 64},
            **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
            **sizes,
        )
        model = transformers.Phi3ForCausalLM(config)
    elif kind == "gemma2":
        config = transformers.Gemma2Config(
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 12},
            **{"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
            **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
            **sizes,
        )
        model = transformers.Gemma2ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=2,
            **sizes,
        )
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)


def write_samples(folder: Path, count: int = 60) -> None:
    """sft.jsonl: completions of very different lengths; dpo.jsonl: pairs of answers; kto.jsonl: answers with labels."""
    sft, dpo, kto = [], [], []
    for i in range(count):
        answer = " ".join(" ".join(WORDS[i % 3 :]).split()[: 1 + 7 * i % 12])
        sft.append({"prompt": f"what is {i}? ", "completion": f"it is {answer}"})
        dpo.append({"prompt": f"what is {i}? ", "chosen": answer, "rejected": f"seven {i}"})
        kto.append(
            {"prompt": f"what is {i}? ", "completion": answer if i % 5 < 3 else f"seven {i}", "label": i % 5 < 3}
        )
    for name, rows in (("sft", sft), ("dpo", dpo), ("kto", kto)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_adapter(folder: Path, adapter: Path, seed: int = 1, **options: Any) -> None:
    """An adapter that peft made, with B not zero."""
    import peft
    import transformers

    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
    tuned = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_magnitude_vector" in name:  # which begins as the norm that there is
                parameter.mul_(0.7 + 0.6 * torch.rand(parameter.shape))
    tuned.save_pretrained(str(adapter))
