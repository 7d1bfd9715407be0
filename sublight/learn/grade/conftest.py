"""One crew for all checks of a test process: to load torch and Triton takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sublight.learn.grade.crew import Crew


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    with Crew(modes=("interpret", "compile", "launch")) as crew:
        yield crew
