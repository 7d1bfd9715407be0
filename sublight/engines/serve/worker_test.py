"""Many ragged requests at once, some of them cancelled: no page is lost, nobody starves, each text is as if alone."""

from __future__ import annotations

import queue
import random
import threading
from typing import Any

import pytest

pytest.importorskip("torch")
from sublight.engines.generate.engine import Request
from sublight.engines.generate.sampling import Sampling
from sublight.engines.serve.failures import Failure
from sublight.engines.serve.fakes import VOCAB, Letters, tiny_engine, tiny_model
from sublight.engines.serve.metrics import Metrics
from sublight.engines.serve.worker import Event, Job, Worker

MODEL = tiny_model()


class Listener:
    """One job's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_done = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if event.is_last:
            self.is_done.set()

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def failure(self) -> Failure | None:
        return self.events[-1].failure if self.events else None


def job_of(prompt: list[int], new: int, how: Sampling | None = None, **more: Any) -> tuple[Job, Listener]:
    listener = Listener()
    return Job(prompt, new, how or Sampling(), listener, **more), listener


def test_a_load_with_cancels() -> None:
    """Half of them drawn, a third begins alike, an eighth goes away; benchmarks/serve_load.py sends 512."""
    count = 32
    chance = random.Random(count)
    engine = tiny_engine(MODEL, pages=30)
    worker = Worker(engine, Letters(), most_waiting=count)
    made, cancelled = [], []
    for place in range(count):
        shared = [7] * 9 if place % 3 == 0 else []
        prompt = shared + [chance.randrange(VOCAB) for _ in range(chance.randint(1, 20))]
        how = Sampling(temperature=0.9, seed=place) if place % 2 else Sampling()
        made.append((*job_of(prompt, chance.randint(1, 25), how, stops=["a"]), prompt, how))
    worker.start()
    for place, (job, *_) in enumerate(made):
        worker.submit([job])
        if place % 8 == 5:
            gone = made[chance.randrange(place + 1)][0]
            cancelled.append(gone)
            worker.cancel([gone])
    kept = [each for each in made if each[0] not in cancelled]
    assert all(listener.is_done.wait(120) for _, listener, *_ in kept)
    worker.stop()
    assert engine.scheduler.pages.free == 30 and engine.scheduler.is_idle and not engine._requests
    for _, listener, prompt, how in chance.sample(kept, count // 4):
        new = sum(len(event.tokens) for event in listener.events)
        alone = Request(list(prompt), new, how)
        list(tiny_engine(MODEL, most_texts=1).run([alone]))
        assert [token for event in listener.events for token in event.tokens] == alone.new
        assert listener.text == Letters().decode(alone.new).split("a")[0]
    assert worker.gauges["waiting"] == 0 and worker.gauges["running"] == 0


def test_what_never_fits_is_not_to_be_tried_again() -> None:
    worker = Worker(tiny_engine(MODEL, most_texts=1), Letters(), most_waiting=1)
    with pytest.raises(Failure, match="3 texts are more than the 2 that fit here") as caught:
        worker.submit([job_of([1, 2], 4)[0] for _ in range(3)])
    assert caught.value.status == 400


def test_a_full_queue_refuses_and_goes_on() -> None:
    worker = Worker(tiny_engine(MODEL, most_texts=1), Letters(), most_waiting=1)
    first, second, third = (job_of([1, 2], 40) for _ in range(3))
    worker.submit([first[0], second[0]])
    with pytest.raises(Failure, match="the queue is full") as caught:
        worker.submit([third[0]])
    assert caught.value.status == 429
    worker.start()
    assert first[1].is_done.wait(60) and second[1].is_done.wait(60)
    worker.submit([third[0]])
    assert third[1].is_done.wait(60) and third[1].events[-1].finish == "length"
    worker.stop()
    with pytest.raises(Failure, match="shutting down"):
        worker.submit([third[0]])


def test_time_is_over_for_one_alone() -> None:
    now = [0.0]
    engine = tiny_engine(MODEL)
    worker = Worker(engine, Letters(), most_s=10.0, clock=lambda: now[0])
    (old, heard), (young, other) = job_of([1], 60), job_of([2], 60)
    worker.submit([old])
    now[0] = 8.0
    worker.submit([young])
    worker._take_in(wait=False)
    worker._step()
    now[0] = 11.0
    worker._give_up_old()
    assert heard.failure is not None and (heard.failure.status, heard.failure.code) == (504, "timeout")
    while not other.is_done.is_set():
        worker._step()
    assert other.failure is None and engine.scheduler.pages.free == 24


def test_a_step_that_fails_ends_its_texts_and_serving_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(MODEL)
    worker = Worker(engine, Letters())
    lost, heard = job_of([1, 2, 3], 9)
    worker.submit([lost])
    worker._take_in(wait=False)
    worker._step()
    again, listener = job_of([1, 2, 3], 9)
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "_run", lambda *_: 1 / 0)
        worker.submit([again])  # it comes while the step runs, and has no part in it
        worker._step()
    assert heard.failure is not None and heard.failure.status == 500
    assert engine.scheduler.pages.free == 24 and not worker.failure
    worker.start()
    assert listener.is_done.wait(60) and listener.failure is None
    worker.stop()


def test_a_text_whose_logits_are_no_numbers_fails_alone() -> None:
    engine = tiny_engine(tiny_model())
    engine.model.weights.tokens[7] = float("nan")
    worker = Worker(engine, Letters())
    (lost, heard), (other, listener) = job_of([1, 7, 3], 9), job_of([1, 2, 3], 2)
    worker.submit([lost, other])
    worker._take_in(wait=False)
    worker._step()
    assert heard.failure is not None and "are no numbers" in heard.failure.message and not heard.events[0].tokens
    assert listener.failure is None and len(listener.events) == 1 and worker.gauges["waiting"] == 0


def test_an_engine_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(MODEL)
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    monkeypatch.setattr(engine, "reset", lambda: [][0])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    worker = Worker(engine, Letters())
    job, heard = job_of([1], 5)
    worker.start()
    worker.submit([job])
    assert heard.is_done.wait(60) and heard.failure is not None
    worker._thread.join(60)
    assert "the engine failed" in worker.failure and worker.gauges["up"] == 0
    with pytest.raises(Failure, match="the engine failed"):
        worker.submit([job_of([1], 5)[0]])


def test_what_runs_is_told_when_the_server_ends() -> None:
    engine = tiny_engine(MODEL)
    worker = Worker(engine, Letters())
    running, waiting = job_of([1, 2], 90), job_of([3], 5)
    worker.submit([running[0]])
    worker._take_in(wait=False)
    worker._step()
    worker.submit([waiting[0]])
    worker.end()
    worker.start()
    assert all(heard.is_done.wait(60) for _, heard in (running, waiting))
    assert all(heard.failure is not None and heard.failure.status == 503 for _, heard in (running, waiting))
    worker._thread.join(60)
    assert engine.scheduler.pages.free == 24 and not worker.failure


def test_a_job_that_the_engine_refuses_is_told_why() -> None:
    worker = Worker(tiny_engine(MODEL), Letters())
    job, heard = job_of([1] * 90, 60)
    worker.submit([job])
    worker._take_in(wait=False)
    assert heard.failure is not None and "more than the model's 96" in heard.failure.message
    assert worker.gauges["waiting"] == 0


class Late(queue.SimpleQueue):  # type: ignore[type-arg]
    """An inbox that is looked into just before something comes in."""

    def __init__(self) -> None:
        self.is_early = True

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.is_early:
            self.is_early = False
            raise queue.Empty
        return super().get(block, timeout)


def test_a_job_that_is_cancelled_as_it_comes_never_begins() -> None:
    engine = tiny_engine(MODEL)
    worker = Worker(engine, Letters())
    worker._inbox = Late()
    job, heard = job_of([1, 2, 3], 9)
    worker.submit([job])
    worker.cancel([job])
    for _ in range(2):
        worker._take_in(wait=False)
    assert engine.scheduler.is_idle and not heard.events
    assert worker._count == 0 and worker.metrics._counts["cancelled"] == 1


def test_nothing_comes_in_behind_the_end() -> None:
    """A thread that looked whether the server ends, and was then held up until it had."""
    worker = Worker(tiny_engine(MODEL), Letters())
    worker.end()
    worker.start()
    worker._thread.join(60)
    worker._is_ending = False
    job, _ = job_of([1], 5)
    with pytest.raises(Failure, match="shutting down"):
        worker.submit([job])
    assert worker._inbox.empty() and worker._count == 0


def test_a_sum_keeps_its_seconds_for_months() -> None:
    metrics = Metrics()
    metrics.ended(12345678.25)
    metrics.ended(0.5)
    text = metrics.text({"pages_free": 1234567.0})
    assert "sublight_request_seconds_sum 12345678.75\n" in text and "sublight_pages_free 1234567\n" in text
