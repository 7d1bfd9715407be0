"""The edits that a user would make, as a diff; no file is touched."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sublight.fix.cure.record import Edit


def unified(edits: Sequence[Edit], *, folder: str) -> str:
    """A unified diff of all files, named from the folder."""
    parts: list[str] = []
    for file in dict.fromkeys(edit.file for edit in edits):
        try:
            before = Path(file).read_text(encoding="utf-8")
            after = edited(before, [edit for edit in edits if edit.file == file])
        except (OSError, UnicodeDecodeError, SyntaxError):
            continue
        name = os.path.relpath(file, folder)
        names = (f"a/{name}", f"b/{name}") if not name.startswith("..") else (file, file)
        parts += difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="")
    return "\n".join(parts)


def edited(source: str, edits: Sequence[Edit]) -> str:
    """The source with the edits made, the last line's first so that the others' lines stay where they are."""
    tree, lines = ast.parse(source), source.splitlines()
    top = _after_imports(tree)
    new = [(top, edit.text) for edit in edits if edit.kind == "import"]
    if any("sublight." in edit.text for edit in edits) and not _imports_sublight(tree):
        new.append((top, "import sublight"))
    for edit in sorted(edits, key=lambda edit: edit.kind == "chained"):  # they stand left of a call's arguments
        if edit.kind == "argument":
            _add_argument(tree, lines, edit)
        elif edit.kind == "chained":
            _chain_before(tree, lines, edit)
        elif edit.kind == "instead":
            lines[edit.line - 1] = _indent(lines[edit.line - 1]) + edit.text
        elif edit.kind == "after":
            new.append((edit.line, _indent(lines[_start(tree, edit.line) - 1]) + edit.text))
    for line, text in sorted(dict.fromkeys(new), key=lambda each: each[0], reverse=True):
        lines.insert(line, text)
    return "\n".join(lines) + "\n" * source.endswith("\n")


def _calls(tree: ast.Module, edit: Edit) -> Iterator[ast.Call]:
    """Calls of that name which the line is part of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno <= edit.line <= (node.end_lineno or 0):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == edit.call:
                yield node


def _chain_before(tree: ast.Module, lines: list[str], edit: Edit) -> None:
    """`x.to(device)` to `x.pin_memory().to(device)`."""
    for node in _calls(tree, edit):
        if isinstance(node.func, ast.Attribute):
            at, end = (node.func.value.end_lineno or node.lineno) - 1, node.func.value.end_col_offset or 0
            raw = lines[at].encode()  # columns are counted in bytes
            lines[at] = (raw[:end] + edit.text.encode() + raw[end:]).decode()
            return


def _add_argument(tree: ast.Module, lines: list[str], edit: Edit) -> None:
    name = edit.text.partition("=")[0]
    for node in _calls(tree, edit):
        if any(keyword.arg == name for keyword in node.keywords):
            continue
        at, end = (node.end_lineno or node.lineno) - 1, (node.end_col_offset or 0) - 1
        raw = lines[at].encode()  # columns are counted in bytes
        head, tail = raw[:end].decode(), raw[end:].decode()
        is_first = not (node.args or node.keywords)
        if not head.strip():  # the bracket has a line of its own: so gets the argument
            last = lines[at - 1].rstrip()
            lines[at - 1] = f"{last}{'' if last.endswith((',', '(')) else ','}\n{_indent(last)}{edit.text},"
            return
        lines[at] = f"{head}{'' if is_first or head.rstrip().endswith(',') else ', '}{edit.text}{tail}"
        return


def _start(tree: ast.Module, end: int) -> int:
    """The first line of the statement that ends there."""
    ends = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.end_lineno == end]
    return max(ends, default=end)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _after_imports(tree: ast.Module) -> int:
    imports = [node.end_lineno or 0 for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    if imports:
        return max(imports)
    docstring = tree.body[:1] if ast.get_docstring(tree) else []
    return (docstring[0].end_lineno or 0) if docstring else 0


def _imports_sublight(tree: ast.Module) -> bool:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return any(alias.name == "sublight" and alias.asname is None for node in imports for alias in node.names)
