"""YAML as settings of a run read it. PyYAML follows YAML 1.1, in which 12:00:00 is 43200, 010 is 8 and 3e-4 is text."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from smp.launch.overrides import Scalar, values

_MOST_LEVELS, _MOST_VALUES = 32, 10_000

# libyaml's loader where PyYAML was built with it: several times as fast.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Numbers are decimal, there are no dates, and a key may be given once."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        # Only these of YAML 1.1's implicit types; numbers are defined below.
        letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "bool", "merge")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
        for key in keys:
            if keys.count(key) > 1 and key != "<<":
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _number(loader: Any, node: Any) -> int | float:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


_NUMBER = "tag:smp:number"
_Loader.add_constructor(_NUMBER, _number)
_Loader.add_implicit_resolver(
    _NUMBER, re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?$"), list("-+.0123456789")
)


class _ScalarLoader(_Loader):
    """Numbers, truth values and null keep their text."""


def _scalar(loader: Any, node: Any) -> Scalar:
    return Scalar(node.value, _Loader.yaml_constructors[node.tag](loader, node))


# Tags with a text and a value; all others are plain.
for _tag in (_NUMBER, "tag:yaml.org,2002:bool", "tag:yaml.org,2002:null"):
    _ScalarLoader.add_constructor(_tag, _scalar)


def load_text(text: str) -> Any:
    """The content of a YAML text.

    Raises:
        ValueError: it is no YAML; one line with the place.
    """
    return values(load_scalars(text))


def load_scalars(text: str) -> Any:
    """The content with a :class:`Scalar` for every unquoted value that is not only a text.

    Raises:
        ValueError: it is no YAML; one line with the place.
    """
    try:
        loaded = yaml.load(text, Loader=_ScalarLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    _check_size(loaded)
    return loaded


def _check_size(loaded: Any) -> None:
    """Raise ValueError for what cannot be a configuration: aliases can make a few lines endless, or larger than
    memory."""
    waiting, seen = [(loaded, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        if depth > _MOST_LEVELS or seen > _MOST_VALUES:
            raise ValueError(f"has more than {_MOST_LEVELS} levels, or {_MOST_VALUES:,} values with those of aliases")
        if isinstance(value, dict | list):
            waiting += [(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value)]
