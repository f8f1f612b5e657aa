"""Sources of classes and functions, from one parse of each file: ``inspect.getsource`` parses the whole file again for
every class, and a file of transformers' has dozens."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from functools import cache
from typing import Any


def source_of(what: Any) -> str:
    """The source of a class, a method or a function, as ``inspect.getsource`` has it.

    Raises:
        OSError: it was made without a file, or is not in it.
        TypeError: it is built in.
    """
    what = inspect.unwrap(what)
    if inspect.isclass(what):
        key: str | int = what.__qualname__
    elif inspect.isfunction(what):
        key = what.__code__.co_firstlineno
    else:
        return inspect.getsource(what)
    file = inspect.getsourcefile(what)
    if file is None or key not in _blocks(file):
        return inspect.getsource(what)  # a lambda, or an error in inspect's words
    first, last = _blocks(file)[key]
    return "".join(linecache.getlines(file)[first - 1 : last])


@cache
def _blocks(file: str) -> dict[str | int, tuple[int, int]]:
    """First and last line of each class of a file, by its qualified name, and of each function, by its first line."""
    found: dict[str | int, tuple[int, int]] = {}
    for name, node in _definitions(ast.parse("".join(linecache.getlines(file))), ""):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        # Of two with one name the first: that is inspect's, too.
        found.setdefault(name if isinstance(node, ast.ClassDef) else first, (first, node.end_lineno))
    return found


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """(qualified name, node) of everything that is defined below, also under ``if`` and ``try``."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, Definition):
            yield prefix + node.name, node
            inside = "." if isinstance(node, ast.ClassDef) else ".<locals>."
            yield from _definitions(node, prefix + node.name + inside)
        elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from _definitions(node, prefix)
