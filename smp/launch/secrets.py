"""Tokens, keys and passwords: recognised by name or form, kept out of files that others read, and never printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from smp.config.command_line.credentials import without_credentials

REMOVED = "(removed)"
# Names of flags, variables and keys that hold secrets.
_WORDS = (
    r"(?:[\w.-]*[_.-])?(?:token|secret|secrets|pat|pass|passwd|auth)|[\w.-]+[_.-](?:key|pwd)|sshpass"
    r"|[\w.-]*(?:access|api|auth|hf)[_.-]?tokens|[\w.-]*(?:access|api|secret|auth)[_-]?keys|[\w.-]*access[_-]?key[_-]?id"
    r"|[\w.-]*(?:apikey|passphrase|credentials?)|[\w.-]*password[\w.-]*|[\w.-]*private[_-]?key[\w.-]*"
    r"|[\w.-]*(?:access|secret)key|[\w.-]*(?-i:[a-z](?:Token|Secret))"
)
_COLUMNS = frozenset(
    f"{column}_key"
    for column in (
        *("prompt", "chosen", "rejected", "messages", "tools", "system", "input", "output", "label", "answer", "text"),
        *("response", "completion", "image", "video", "audio", "reward_fn", "chat_template", "sort", "group", "row"),
    )
)
"""Names of data columns, which end like secrets and are none."""
_FORMS = (
    r"hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|nvapi-[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"
)
"""Forms of tokens: Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, NVIDIA, and JWT."""
_NAME = re.compile(_WORDS, re.IGNORECASE)
_VALUE = r"'[^']*'|\"[^\"]*\"|[^\s'\",;}\]]+"
_GIVEN = re.compile(
    rf"(?<![\w.-])(?P<name>--?(?:{_WORDS})(?=[=\s])|(?:{_WORDS})(?==)|Bearer(?=[ ])|(?:wandb|comet)[ ]login(?=[ ]+\w))"
    rf"(?P<between>=|\s+)(?P<value>{_VALUE})",
    re.IGNORECASE,
)
"""``NAME=value`` in a shell line, a flag with its value, and what is passed to a server."""
_LINE = re.compile(rf"^[\s-]*['\"]?(?P<name>{_WORDS})['\"]?: +\S", re.IGNORECASE | re.MULTILINE)
"""A line of a YAML file with the name of a secret."""
_FORMED = re.compile(rf"(?<![\w-])(?:{_FORMS})(?![\w-])")
_SHORTEST = 6  # of what is looked for in other texts: a password "1" would take every 1 with it


def is_secret(name: str) -> bool:
    """Whether the value of this name is secret: HF_TOKEN, WANDB_API_KEY, PGPASSWORD, --hf-access-token."""
    name = name.lstrip("-")
    return _NAME.fullmatch(name) is not None and name.rpartition(".")[2] not in _COLUMNS


def is_token(value: str) -> bool:
    """Whether a value has the form of a token, whatever its name."""
    return _FORMED.search(value) is not None


def without_secrets(node: Any) -> Any:
    """A configuration that may be recorded."""
    # A secret may also be part of other values, such as a URL.
    known = [value for value in secret_values(node) if len(value) >= _SHORTEST]
    return _removed(node, known)


def _removed(node: Any, known: list[str]) -> Any:
    if isinstance(node, dict):
        return {key: REMOVED if _holds(key, value) else _removed(value, known) for key, value in node.items()}
    if isinstance(node, list):
        # Lists of words: the word after --token is its value.
        pairs = zip([None, *node], node, strict=False)
        return [REMOVED if _is_argument_of(before, item) else _removed(item, known) for before, item in pairs]
    return hidden(node, known) if isinstance(node, str) else node


def secret_values(node: Any) -> Iterator[str]:
    """Values in a configuration that are secrets by name or form."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from [str(value)] if _holds(key, value) else secret_values(value)
    elif isinstance(node, list):
        for before, item in zip([None, *node], node, strict=False):
            yield from [item] if _is_argument_of(before, item) else secret_values(item)
    elif isinstance(node, str):
        yield from (match["value"].strip("'\"") for match in _GIVEN.finditer(node) if _is_given(match))
        yield from _FORMED.findall(node)


def _is_given(match: re.Match[str]) -> bool:
    """Whether a match has the name of a secret, and not of a data column."""
    return match["name"].lstrip("-").rpartition(".")[2] not in _COLUMNS


def _holds(key: Any, value: Any) -> bool:
    return is_secret(str(key)) and value not in (None, "") and not isinstance(value, dict | list)


def _is_argument_of(before: Any, item: Any) -> bool:
    return isinstance(before, str) and isinstance(item, str) and before.startswith("-") and is_secret(before)


def hidden(text: str, known: list[str]) -> str:
    """A text without secrets: ``known`` ones, those of known forms, those after their names, and those in URLs."""
    for value in known:
        text = text.replace(value, REMOVED)
    text = _FORMED.sub(REMOVED, text)
    text = _GIVEN.sub(lambda match: _without_value(match) if _is_given(match) else match[0], text)
    return str(without_credentials(text))


def _without_value(match: re.Match[str]) -> str:
    return f"{match['name']}{match['between']}{REMOVED}"


def hidden_words(words: list[str], texts: list[str]) -> list[str]:
    """Texts that may be printed about a command with these words."""
    known = []
    for word in words:
        key, _, value = word.partition("=")
        known += [value.strip("'\"")] if is_secret(key.rpartition(".")[2]) else list(secret_values(word))
        # Inline YAML, {name: value}, when one of its names is secret: all values are hidden.
        known += re.findall(r"[\w.-]+\s*:\s*([^\s,}]+)", value) if "{" in value and _names_one(value) else []
    known = [value for value in known if len(value) >= _SHORTEST]
    return [hidden(text, known) for text in texts]


def _names_one(text: str) -> bool:
    return any(is_secret(name) for name in re.findall(r"[\w.-]+(?=\s*:)", text))


def is_private(text: str) -> bool:
    """Whether a file with this text must be readable by its owner only: a line or a URL in it has a secret."""
    lines = (match["name"].rpartition(".")[2] not in _COLUMNS for match in _LINE.finditer(text))
    return hidden(text, []) != text or any(lines)
