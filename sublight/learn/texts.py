"""An exercise's texts: one Markdown file for each language, taken apart at its headings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sublight.errors import BadInput
from sublight.learn.record import Exercise

LANGUAGES = {"en": "English", "zh": "中文"}
HINTS = 3
SECTIONS = ("why", "task", "hint 1", "hint 2", "hint 3", "solution", "mistakes", "next")
_HEADING = re.compile(rf"^## ({'|'.join(SECTIONS)}): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One language's texts. A heading reads `## why: Why a copy`: the section's key, and what a reader sees."""

    language: str
    title: str
    headings: dict[str, str]
    sections: dict[str, str]

    def part(self, *keys: str) -> str:
        """Sections as Markdown, with their headings."""
        return "\n\n".join(f"## {self.headings[key]}\n\n{self.sections[key]}" for key in keys)

    @property
    def page(self) -> str:
        """What is read before the work."""
        return f"# {self.title}\n\n{self.part('why', 'task')}"

    def hint(self, level: int) -> str:
        """One hint; of a level behind the last, all of them."""
        return self.part(*([f"hint {level}"] if level <= HINTS else [f"hint {each}" for each in range(1, HINTS + 1)]))

    @property
    def explanation(self) -> str:
        """What is read after it."""
        return self.part("solution", "mistakes", "next")


def text_of(exercise: Exercise, language: str) -> Text:
    """A text in that language if it exists, else in English."""
    if language not in LANGUAGES:
        raise BadInput(f"unknown language {language!r}: use {' or '.join(LANGUAGES)}")
    start = "cuda." if exercise.kind == "cuda" else ""
    file = exercise.folder / f"{start}{language}.md"
    if not file.exists():
        language, file = "en", exercise.folder / f"{start}en.md"
    return parse(file.read_text(encoding="utf-8"), language)


def parse(words: str, language: str) -> Text:
    """
    >>> text = parse("# Copy\\n\\n## why: Why\\n\\nMemory.\\n\\n## task: Task\\n\\nCopy x.", "en")
    >>> text.title, text.headings["why"], text.sections["task"]
    ('Copy', 'Why', 'Copy x.')
    """
    headings = list(_HEADING.finditer(words))
    ends = [heading.start() for heading in headings[1:]] + [len(words)]
    return Text(
        language=language,
        title=words.splitlines()[0].removeprefix("# ").strip(),
        headings={heading[1]: heading[2].strip() for heading in headings},
        sections={heading[1]: words[heading.end() : end].strip() for heading, end in zip(headings, ends, strict=True)},
    )
