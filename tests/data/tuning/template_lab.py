"""Ten chat templates in the ways of those that models come with, each with generation blocks and without."""

from __future__ import annotations

import random
from typing import Any

_LOOP = "{% for m in messages %}", "{% endfor %}"


def _both(source: str, ask: str = "") -> tuple[str, str]:
    """(with generation blocks where « and » stand, without)."""
    whole = _LOOP[0] + source + _LOOP[1] + ("{% if add_generation_prompt %}" + ask + "{% endif %}" if ask else "")
    marked = whole.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
    return marked, whole.replace("«", "").replace("»", "")


def _roles(**sources: str) -> str:
    """What is written for each role."""
    parts = [f"{{% if m.role == '{role}' %}}{source}{{% endif %}}" for role, source in sources.items()]
    return "".join(parts)


TEMPLATES: dict[str, tuple[str, str]] = {
    "chatml": _both(
        _roles(
            system="<|im_start|>system\n{{ m.content }}<|im_end|>{{ '\n' }}",
            user="<|im_start|>user\n{{ m.content }}<|im_end|>{{ '\n' }}",
            assistant="<|im_start|>assistant\n«{{ m.content }}<|im_end|>»{{ '\n' }}",
        ),
        "<|im_start|>assistant\n",
    ),
    "llama2": _both(
        _roles(
            system="{{ bos_token }}<<SYS>>\n{{ m.content }}\n<</SYS>>\n\n",
            user="{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]",
            assistant="«{{ ' ' + m.content.strip() + ' ' + eos_token }}»",
        )
    ),
    "llama3": _both(
        _roles(
            system="{{ bos_token }}<sep>system\n\n{{ m.content | trim }}<|eot|>",
            user="<sep>user\n\n{{ m.content | trim }}<|eot|>",
            assistant="<sep>assistant\n\n«{{ m.content | trim }}<|eot|>»",
        ),
        "<sep>assistant\n\n",
    ),
    "zephyr": _both(
        _roles(
            system="<|user|>\n{{ m.content + eos_token }}\n",
            user="<|user|>\n{{ m.content + eos_token }}\n",
            assistant="<|assistant|>\n«{{ m.content + eos_token }}»{{ '\n' }}",
        ),
        "<|assistant|>\n",
    ),
    "no-line": _both(
        _roles(
            system="{{ m.content }}<sep>",
            user="<|user|>{{ m.content }}<|im_end|>",
            assistant="<|assistant|>«{{ m.content }}<|im_end|>»",
        ),
        "<|assistant|>",
    ),
    "vicuna": _both(
        _roles(
            system="{{ m.content }} ",
            user="USER: {{ m.content }} ",
            assistant="ASSISTANT:«{{ ' ' + m.content + eos_token }}»",
        ),
        "ASSISTANT:",
    ),
    "blank-before-answer": _both(
        _roles(
            system="{{ m.content }}\n",
            user="USER: {{ m.content }} ASSISTANT: ",
            assistant="«{{ m.content + eos_token }}»{{ '\n' }}",
        )
    ),
    "headings": _both(
        _roles(
            system="{{ m.content }}\n\n",
            user="### Instruction:\n{{ m.content }}\n\n",
            assistant="### Response:\n«{{ m.content + eos_token }}»{{ '\n\n' }}",
        ),
        "### Response:\n",
    ),
    "nothing-between": _both(
        _roles(system="{{ m.content }}", user="{{ m.content }}", assistant="«{{ m.content + eos_token }}»")
    ),
    "separators": _both(
        _roles(
            system="{{ bos_token + m.content + sep_token }}",
            user="{{ m.content + sep_token }}",
            assistant="«{{ m.content + eos_token }}»",
        )
    ),
}

WORDS = [
    *("the", "answer", "is", "four", "two", "plus", "Über", "naïve", "漢字", "😀", "don't", "2+2=", "42", "x"),
    *(".", "?", "!", ":", "(", "=", "ab", "q", "7", "{", "é", "🙃", "def f(x):"),
]
_BETWEEN = ["", " ", "  ", "\n", "\n\n", "\t", " - ", ", "]


def random_text(draw: random.Random, edges: bool = True) -> str:
    """Words of several scripts and what can stand between them; with ``edges`` also in front and behind."""
    text = "".join(draw.choice(WORDS) + draw.choice(_BETWEEN) for _ in range(draw.randint(1, 5)))
    text = text.strip() or "x"
    return draw.choice(_BETWEEN) + text + draw.choice(_BETWEEN) if edges and draw.random() < 0.4 else text


def random_messages(draw: random.Random) -> list[dict[str, Any]]:
    """A conversation of one to three exchanges, with or without a system text."""
    turns = [("user", "assistant")[i % 2] for i in range(2 * draw.randint(1, 3))]
    roles = ["system"] * draw.randint(0, 1) + turns
    return [{"role": role, "content": random_text(draw)} for role in roles]
