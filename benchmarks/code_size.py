"""Figures of the package's source: lines of each room, functions, folders, circles of imports, comments.

    python benchmarks/code_size.py    # a second; docs/measurements/code.md has the tables

A line counts as code if it is no docstring, comment or blank line. The share of comments is that of lines with one,
after code too. Imports inside of functions and for types count as imports.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def kinds(text: str, tree: ast.Module) -> Counter[str]:
    """Number of lines by kind."""
    docstrings = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = Counter(with_comment=len({token.start[0] for token in tokens if token.type == tokenize.COMMENT}))
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        kind = "blank" if not bare else "comments" if bare.startswith("#") else "code"
        found["docstrings" if number in docstrings else kind] += 1
        found["all"] += 1
    return found


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """Modules of the package that a module imports, wherever in it."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & modules or {node.module}
    return found & modules


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Modules that import themselves by way of others."""
    left = dict(graph)
    # Who imports nothing that is left, or is imported by nothing that is left, is in no circle.
    while True:
        used = set().union(*left.values())
        free = [name for name, uses in left.items() if not uses & left.keys() or name not in used]
        if not free:
            return set(left)
        for name in free:
            del left[name]


def main() -> None:
    rooms, functions, folders, lengths = dict[str, Counter[str]](), list[int](), Counter[str](), dict[str, int]()
    graph = dict[str, set[str]]()
    files = sorted((ROOT / "smp").rglob("*.py"))
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        parts = path.relative_to(ROOT / "smp").parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "smp itself", Counter()).update(kinds(text, tree))
        functions += [
            (node.end_lineno or 0) - node.lineno + 1
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        folders[str(path.parent.relative_to(ROOT))] += 1
        lengths[str(path.relative_to(ROOT))] = text.count("\n")
        graph[names[path]] = imported(tree, set(names.values())) - {names[path]}
    total = sum(rooms.values(), Counter[str]())
    print("| room | lines | code | docstrings | comments |\n|---|--:|--:|--:|--:|")
    for room, count in sorted([*rooms.items(), ("all", total)], key=lambda item: -item[1]["all"]):
        share = 100 * count["with_comment"] / count["all"]
        print(f"| {room} | {count['all']:,} | {count['code']:,} | {count['docstrings']:,} | {share:.1f} % |")
    functions.sort()
    middle, late = functions[len(functions) // 2], functions[int(0.95 * len(functions))]
    print(f"\n{len(files)} files; the longest: {max(lengths.items(), key=lambda item: item[1])}")
    print(f"{len(functions)} functions: median {middle} lines, 95th percentile {late}, longest {functions[-1]}")
    print(f"most files in a folder: {folders.most_common(1)[0]}; modules in circles: {sorted(in_circles(graph))}")


if __name__ == "__main__":
    main()
