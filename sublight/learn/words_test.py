"""Every word that `sublight learn` shows around its texts is there in Chinese, with the same gaps; none is unused."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest

from sublight.learn.exercises import CHAPTERS
from sublight.learn.words import CHINESE, say

PACKAGE = Path(__file__).resolve().parents[1]
SPEAKERS = ("report/learn.py", "report/roadmap.py", "cli/learn.py")


def constants(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def wanted(source: str) -> set[str]:
    """What the calls of `say` may be given: the words themselves, or what the name that stands there is bound to.

    >>> sorted(wanted('def f(x):\\n    words = "a b" if x else "c d"\\n    return say("zh", words) + say("zh", "e")'))
    ['a b', 'c d', 'e']
    """
    found: set[str] = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "say"):
                continue
            key = call.args[1]
            if isinstance(key, ast.Constant):
                found.add(key.value)
                continue
            assert isinstance(key, ast.Name), ast.unparse(call)
            for each in ast.walk(function):
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == key.id:
                    found |= {words for words in constants(each.value) if " " in words}
                elif isinstance(each, ast.For) and ast.unparse(each.target) == key.id:
                    found |= constants(each.iter) - {""}
    return found


def gaps(words: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(words) if name is not None}


def test_every_word_is_there_in_chinese() -> None:
    shown = set(CHAPTERS.values())
    for file in SPEAKERS:
        shown |= wanted((PACKAGE / file).read_text(encoding="utf-8"))
    assert shown - set(CHINESE) == set() and set(CHINESE) - shown == set()


@pytest.mark.parametrize("words", CHINESE)
def test_the_gaps_are_the_same(words: str) -> None:
    assert gaps(words) == gaps(CHINESE[words])
    filled = {name: name.upper() for name in gaps(words)}
    assert all(part in say("zh", words, **filled) and part in say("en", words, **filled) for part in filled.values())
