"""The edits that a user would make, as a diff that `git apply` takes; no file is touched.

Files are read and compared byte for byte: line ends, tabs, form feeds and a missing newline at the end stay.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sublight.fix.cure.record import Edit

NO_NEWLINE = "\\ No newline at end of file\n"
BOM = "\ufeff"
_HUNK = re.compile(r"@@ -(?P<start>\d+)(?:,(?P<count>\d+))? \+\d+(?:,\d+)? @@")


def unified(edits: Sequence[Edit], *, folder: str) -> str:
    """A unified diff of all files, named from the folder; of a file that cannot be edited there is none."""
    parts: list[str] = []
    for file in dict.fromkeys(edit.file for edit in edits):
        name = os.path.relpath(file, folder)
        if name.startswith("..") or any(sign in name for sign in '\n\t"\\'):
            continue
        if os.path.realpath(file) != os.path.join(os.path.realpath(folder), name):
            continue  # behind a link: git would not touch it, and neither do we
        try:
            before = Path(file).read_bytes().decode("utf-8")
            after = edited(before, [edit for edit in edits if edit.file == file])
            ast.parse(after.removeprefix(BOM))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue
        tab = "\t" if " " in name else ""  # where a name with a space ends
        lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}{tab}", f"b/{name}{tab}")
        parts += [line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in lines]
    return "".join(parts)


def applied(diff: str, folder: str) -> dict[str, bytes]:
    """What each file of a diff becomes, by its name from the folder; ValueError where it does not fit to the bytes."""
    found: dict[str, bytes] = {}
    for part in re.split(r"^(?=--- a/)", diff, flags=re.MULTILINE)[1:]:
        _, second, *body = _lines(part)
        name = second.removeprefix("+++ b/").rstrip("\n").removesuffix("\t")
        found[name] = "".join(_patched(_lines(Path(folder, name).read_bytes().decode("utf-8")), body)).encode()
    return found


def check_with_git(diff: str, folder: str, files: dict[str, bytes]) -> None:
    """ValueError unless `git apply` makes these files of the diff; without git, nothing is checked."""
    git = shutil.which("git")
    if not git or not diff:
        return
    with tempfile.TemporaryDirectory(prefix="sublight-diff-") as scratch:
        for name in files:
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder, name), Path(scratch, name))
        words = [git, "apply", "--whitespace=nowarn", "-"]
        alone = {**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.realpath(scratch))}
        done = subprocess.run(words, cwd=scratch, env=alone, input=diff.encode(), capture_output=True, check=False)
        if done.returncode or any(Path(scratch, name).read_bytes() != content for name, content in files.items()):
            raise ValueError(f"git apply does not take the diff: {done.stderr.decode(errors='replace').strip()}")


def _patched(before: list[str], body: Sequence[str]) -> list[str]:
    after: list[str] = []
    at = 0  # of the lines before
    for place, line in enumerate(body):
        text = line[1:]
        if place + 1 < len(body) and body[place + 1] == NO_NEWLINE:
            text = text.removesuffix("\n")
        if match := _HUNK.match(line):
            start = int(match["start"]) - (match["count"] != "0")
            after += before[at:start]
            at = start
        elif line[0] in " -":
            if before[at : at + 1] != [text]:
                raise ValueError(f"the diff does not fit to line {at + 1}")
            after += [text] * (line[0] == " ")
            at += 1
        elif line[0] == "+":
            after.append(text)
    return after + before[at:]


def _lines(text: str) -> list[str]:
    """Parted where git does: a form feed or a lone carriage return ends no line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def edited(source: str, edits: Sequence[Edit]) -> str:
    """The source with the edits made."""
    if re.search(r"\r(?!\n)", source):
        raise ValueError("lines end with a carriage return alone: Python counts them, git does not")
    mark = BOM if source.startswith(BOM) else ""
    end = "\r" if "\r\n" in source else ""
    tree, lines = ast.parse(source.removeprefix(BOM)), source.removeprefix(BOM).replace("\r\n", "\n").split("\n")
    top = _after_imports(tree)
    new = [(max(top, after), edit.text) for edit in edits if edit.kind == "import" and (after := _after_torch(tree))]
    if any("sublight." in edit.text for edit in edits) and not _imports_sublight(tree):
        new.insert(0, (top, "import sublight"))
    for edit in sorted(edits, key=lambda edit: edit.kind == "chained"):  # they stand left of a call's arguments
        if edit.kind == "argument":
            _add_argument(tree, lines, edit)
        elif edit.kind == "chained":
            _chain_before(tree, lines, edit)
        elif edit.kind == "instead":
            _take_out(tree, lines, edit)
        elif edit.kind == "before":
            new.append((edit.line - 1, _indent(lines[edit.line - 1]) + edit.text))
    for line in sorted(
        {line for line, _ in new}, reverse=True
    ):  # the last first: the others' lines stay where they are
        lines[line:line] = [text for at, text in dict.fromkeys(new) if at == line]
    text = "\n".join(lines)
    return mark + (text.replace("\n", end + "\n") if end else text)


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
        at, end = (node.end_lineno or node.lineno) - 1, (node.end_col_offset or 0) - 1  # of the closing bracket
        raw = lines[at].encode()  # columns are counted in bytes
        head, tail = raw[:end].decode(), raw[end:].decode()
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if head.strip() or not arguments:
            lines[at] = f"{head}{'' if not arguments or head.rstrip().endswith(',') else ', '}{edit.text}{tail}"
            return
        # the bracket has a line of its own: so gets the argument
        last = max(arguments, key=lambda value: (value.end_lineno or 0, value.end_col_offset or 0))
        line, column = (last.end_lineno or 0) - 1, last.end_col_offset or 0
        raw = lines[line].encode()
        if not raw[column:].lstrip().startswith(b","):
            raw = raw[:column] + b"," + raw[column:]
        lines[at] = f"{_indent(lines[last.lineno - 1])}{edit.text},\n{lines[at]}"
        lines[line] = raw.decode()
        return


def _take_out(tree: ast.Module, lines: list[str], edit: Edit) -> None:
    """A call that is a statement; what stands beside it on its line stays."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and node.value in set(_calls(tree, edit)) and node.lineno == node.end_lineno:
            raw = lines[node.lineno - 1].encode()
            lines[node.lineno - 1] = (raw[: node.col_offset] + edit.text.encode() + raw[node.end_col_offset :]).decode()
            return


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _after_imports(tree: ast.Module) -> int:
    """The line behind the imports that a file begins with, or behind its docstring."""
    end = 0
    for place, node in enumerate(tree.body):
        is_docstring = place == 0 and ast.get_docstring(tree) is not None
        if not is_docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        end = node.end_lineno or 0
    return end


def _after_torch(tree: ast.Module) -> int:
    """The line behind the file's import of torch; 0: it has none of its own."""
    for node in tree.body:
        if isinstance(node, ast.Import) and any(alias.name == "torch" and not alias.asname for alias in node.names):
            return node.end_lineno or 0
    return 0


def _imports_sublight(tree: ast.Module) -> bool:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return any(alias.name == "sublight" and alias.asname is None for node in imports for alias in node.names)
