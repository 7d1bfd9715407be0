"""The scheduler against a simple model of it: a memory of slots that remembers which token was written where."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight.engines.generate.pages import Pages
from sublight.engines.generate.scheduler import Chunk, Scheduler, Text
from sublight.errors import BadInput


def expected(tokens: list[int], most: int) -> list[int]:
    """What a text becomes: the next token follows from all before it."""
    tokens = list(tokens)
    while len(tokens) < most:
        tokens.append(follow(tokens))
    return tokens


def follow(tokens: list[int]) -> int:
    return (sum((place + 1) * token for place, token in enumerate(tokens)) * 31 + 7) % 5


def drive(
    prompts: list[list[int]],
    new: list[int],
    *,
    pages: int,
    size: int,
    texts: int,
    budget: int,
    seed: int = 0,
    cancels: int = 0,
) -> list[Text]:
    """Arrivals and cancels at random moments, some steps before the tokens of the last are known; every step is
    checked."""
    chance = random.Random(seed)
    scheduler = Scheduler(Pages(pages, size), most_texts=texts, most_tokens=budget)
    memory = [-1] * (pages * size)
    coming = [Text(list(prompt), len(prompt) + more) for prompt, more in zip(prompts, new, strict=True)]
    made, arrived, cancelled = list(coming), [], []
    early: list[Chunk] = []
    steps = 0
    while coming or not scheduler.is_idle:
        while coming and chance.random() < 0.5:
            arrived.append(coming.pop(0))
            scheduler.add(arrived[-1])
        if len(cancelled) < cancels and arrived and chance.random() < 0.2:
            cancelled.append(chance.choice(arrived))
            scheduler.cancel(cancelled[-1])
        oldest = next((text for text in arrived if not text.is_over), None)
        before = oldest and (oldest.cached, len(oldest.tokens))
        chunks = [chunk for chunk in early if not chunk.text.is_over]
        is_early = bool(chunks)
        chunks = chunks or scheduler.next_step()
        assert sum(chunk.count for chunk in chunks) <= budget and len(scheduler.running) <= texts
        assert len({id(chunk.text) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.count >= 1 and chunk.start == chunk.text.cached
            for place, slot in zip(range(chunk.start, chunk.start + chunk.count), scheduler.slots(chunk), strict=True):
                assert not is_early or memory[slot] == chunk.text.tokens[place]  # the device was first
                memory[slot] = chunk.text.tokens[place]
        are_decodes = all(chunk.is_decode for chunk in chunks)
        for chunk in chunks:
            scheduler.done(chunk)
        early = scheduler.next_before_tokens(chunks) if are_decodes and chance.random() < 0.7 else []
        assert all(chunk.start == chunk.text.cached == len(chunk.text.tokens) for chunk in early)
        for chunk in early:
            memory[scheduler.slots(chunk)[0]] = follow(chunk.text.tokens)
        for chunk in chunks:
            read = [memory[chunk.text.pages[at // size] * size + at % size] for at in range(chunk.text.cached)]
            assert read == chunk.text.tokens[: chunk.text.cached]  # nobody else wrote there
            if chunk.ends_the_text:
                scheduler.append(chunk.text, follow(read), ends=False)
        held = {page for text in scheduler.running for page in text.pages}
        assert scheduler.pages.free == pages - len(held)  # none is lost, none is both free and held
        if oldest:
            assert oldest.is_over or (oldest.cached, len(oldest.tokens)) != before  # the oldest always goes on
        steps += 1
        assert steps < 10_000
    assert scheduler.pages.free == pages
    for text, prompt, more in zip(made, prompts, new, strict=True):
        assert text in cancelled or text.tokens == expected(prompt, len(prompt) + more)
    return made


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    more=st.integers(1, 9),
    pages=st.integers(0, 9),
    size=st.integers(1, 5),
    texts=st.integers(1, 5),
    budget=st.integers(1, 20),
    seed=st.integers(0, 99),
    cancels=st.integers(0, 3),
)
def test_every_text_ends_as_if_alone(
    prompts: list[list[int]], more: int, pages: int, size: int, texts: int, budget: int, seed: int, cancels: int
) -> None:
    """Few tokens, so that beginnings are shared; few pages, so that they run short."""
    new = [1 + (more + place) % 9 for place in range(len(prompts))]
    least = max(-(-(len(prompt) + more) // size) for prompt, more in zip(prompts, new, strict=True))
    how = {"size": size, "texts": texts, "budget": budget, "seed": seed, "cancels": cancels}
    drive(prompts, new, pages=least + pages, **how)


def test_texts_that_begin_alike_share_pages() -> None:
    texts = drive([[1, 2, 3, 4, 5]] * 4, [6] * 4, pages=40, size=2, texts=1, budget=64)
    assert [text.reused for text in texts] == [0, 4, 4, 4]
    texts = drive([[1, 2, 3, 4]] * 2, [6] * 2, pages=40, size=2, texts=1, budget=64)
    assert [text.reused for text in texts] == [0, 2]  # the last token is always computed


def test_texts_that_come_together_wait_for_what_they_share() -> None:
    """Choices of one prompt: it is computed once, in chunks, too; a text that shares little does not wait."""
    for budget in (64, 3):
        texts = drive([[1, 2, 3, 4, 5]] * 4, [6] * 4, pages=40, size=2, texts=4, budget=budget)
        assert [text.reused for text in texts] == [0, 4, 4, 4]
    scheduler = Scheduler(Pages(40, 2), most_texts=4, most_tokens=64)
    first, short, other = Text([1, 2, 3, 4, 5], 9), Text([1, 2, 9, 9, 9], 9), Text([1, 2, 3, 4, 6], 9)
    for text in (first, short, other):
        scheduler.add(text)
    assert [chunk.text for chunk in scheduler.next_step()] == [first, short]
    scheduler.cancel(first)
    assert [chunk.text for chunk in scheduler.next_step()] == [short, other]  # nobody computes it any more


def test_a_short_cache_preempts_the_youngest() -> None:
    texts = drive([[1] * 4, [0] * 4], [8, 8], pages=6, size=2, texts=2, budget=64)
    assert texts[0].preempted == 0 and texts[1].preempted > 0


def test_what_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(Pages(2, 4), most_texts=1, most_tokens=1)
    with pytest.raises(BadInput, match="do not fit into a cache of 8"):
        scheduler.add(Text([1] * 4, 9))
    with pytest.raises(BadInput, match="without tokens"):
        scheduler.add(Text([], 4))


def test_a_page_is_not_given_back_twice() -> None:
    pages = Pages(2, 4)
    taken = [pages.take()]
    pages.release(taken)
    with pytest.raises(AssertionError, match="twice"):
        pages.release(taken)
