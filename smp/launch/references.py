"""References between keys of a configuration, ``${key}``, replaced by their values.

OmegaConf does it. Importing it takes as long as all the rest of a dry run, so a tree whose references are plain ones
(``${a.b}``, ``${.b}``) is resolved here, to the same values; for anything else, mistakes included, OmegaConf is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[Any, ...]
_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_]\w*(?:\.\w+)*)\}")


class UnresolvedError(ValueError):
    """A reference that cannot be resolved.

    Attributes:
        key: where it is.
    """

    def __init__(self, key: str, reason: str):
        super().__init__(reason)
        self.key = key


def resolved(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``tree`` with references replaced by their values.

    Raises:
        UnresolvedError: a reference to nothing, to itself, or one that is not in the grammar.
    """
    texts = list(_texts(tree))
    # Without references nothing is copied or imported.
    if not any("${" in text or text.endswith("???") for text in texts):  # ???: OmegaConf's sign of a missing value
        return dict(tree)
    resolver = _Resolver(tree)
    found = {name: resolver.value(value, (name,), ()) for name, value in tree.items()}
    return found if resolver.plain else _by_omegaconf(tree)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping | list):
        for item in node.values() if isinstance(node, Mapping) else node:
            yield from _texts(item)


class _Resolver:
    """Replaces plain references.

    Attributes:
        plain: whether there were no others.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree, self.plain = tree, True

    def value(self, node: Any, path: Path, waiting: tuple[Path, ...]) -> Any:
        """The resolved value at ``path``; ``waiting``: paths of the texts that refer to it.

        Raises:
            UnresolvedError: it is one of them. OmegaConf would not end.
        """
        if isinstance(node, Mapping):
            return {name: self.value(value, (*path, name), waiting) for name, value in node.items()}
        if isinstance(node, list):
            return [self.value(value, (*path, index), waiting) for index, value in enumerate(node)]
        if not isinstance(node, str) or not ("${" in node or node.endswith("???")):
            return node
        # The path is waiting for its own value: a circle.
        if path in waiting:
            raise UnresolvedError(".".join(map(str, path)), f"{node} refers to itself")
        rest = _REFERENCE.sub("", node)
        if "${" in rest or "\\" in rest or rest.endswith("???"):
            self.plain = False
        whole = _REFERENCE.fullmatch(node)
        waiting = (*waiting, path)
        if whole:
            return self.referred(whole, path, waiting)
        return _REFERENCE.sub(lambda match: self._inside(self.referred(match, path, waiting)), node)

    def _inside(self, value: Any) -> str:
        """A value inside a longer text."""
        if isinstance(value, Mapping | list):
            self.plain = False
        return str(value)

    def referred(self, match: re.Match[str], path: Path, waiting: tuple[Path, ...]) -> Any:
        """The value that a reference at ``path`` refers to."""
        # As in OmegaConf: one dot is the section of the reference, each further one a section
        # above.
        dots, names = len(match[1]), match[2].split(".")
        target: Path = (*(path[:-dots] if dots else ()), *names)
        node: Any = self.tree
        for name in target:
            if dots > len(path) or not isinstance(node, Mapping) or name not in node:
                # Unknown names: OmegaConf has the error messages.
                self.plain = False
                return None
            node = node[name]
        return self.value(node, target, waiting)


def _by_omegaconf(tree: Mapping[str, Any]) -> dict[str, Any]:
    # Imported here: commands that resolve nothing, such as --list, start without it.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        _register_resolvers()
        found = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    except OmegaConfBaseException as error:
        raise UnresolvedError(getattr(error, "full_key", None) or "recipes", str(error).splitlines()[0]) from None
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def _register_resolvers() -> None:
    """Register the functions that HyperPod's recipes may call in ``${...}``."""
    from omegaconf import OmegaConf

    functions = {
        "multiply": lambda x, y: x * y,
        "divide_ceil": lambda x, y: -(-x // y),
        "divide_floor": lambda x, y: x // y,
    }
    for name, function in functions.items():
        OmegaConf.register_resolver(name, function, replace=True)
