"""The engine on a thread of its own: jobs come in and are cancelled from other threads, events go out to them.

Nothing but this thread touches the engine. Between two steps it looks at what came in: new jobs, cancelled ones, and
those whose time is over; a cancelled job's pages are free before the next step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sublight.engines.generate.engine import Engine, Request
from sublight.engines.generate.sampling import Logprobs, Sampling
from sublight.engines.generate.scheduler import Text
from sublight.engines.generate.vocabulary import Vocabulary
from sublight.engines.generate.writer import Writer
from sublight.engines.serve.failures import Failure
from sublight.engines.serve.metrics import Metrics
from sublight.errors import BadInput

NO_NUMBERS = "the model's logits for this text are no numbers: serve it with another --dtype, as bf16"
SHUTTING_DOWN = "the server is shutting down: try again later"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one step gave to a job: text that is sure, its tokens, and, at the end, why it ended."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()  # with the first token, where they are wanted
    finish: str = ""  # "stop" or "length"
    failure: Failure | None = None

    @property
    def is_last(self) -> bool:
        return bool(self.finish) or self.failure is not None


Emit = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class Job:
    """One prompt that is to go on, and where its events go."""

    prompt: Sequence[int]
    most_new: int
    sampling: Sampling
    emit: Emit
    ends: frozenset[int] = frozenset()
    stops: Sequence[str] = ()
    with_prompt: bool = False  # log-probabilities of the prompt, too
    goes_on: bool = False  # the prompt's text, as a completion does; a chat's reply is a text by itself
    arrived_s: float = 0.0
    text: Text | None = None
    request: Request | None = None
    writer: Writer | None = None
    is_over: bool = field(default=False)
    is_cancelled: bool = False


class Worker:
    """`most_waiting` jobs may wait for their turn; `most_s` seconds may pass until one has ended."""

    def __init__(
        self,
        engine: Engine,
        words: Vocabulary,
        *,
        most_waiting: int = 256,
        most_s: float = 600.0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        deliver: Callable[[list[tuple[Emit, Event]]], None] | None = None,
    ) -> None:
        self.engine, self.words, self.metrics = engine, words, metrics or Metrics()
        self.most_s, self.clock = most_s, clock
        self.most_jobs = most_waiting + engine.scheduler.most_texts
        self.failure = ""  # why the thread gave up
        self._deliver = deliver or (lambda events: [emit(event) for emit, event in events] and None)
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._jobs: dict[Request, Job] = {}  # of this thread alone
        self._count, self._lock = 0, threading.Lock()
        self._cancelled: set[Job] = set()
        self._is_ending = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sublight engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """What runs is cancelled, and told so; nothing is waited for."""
        self._is_ending = True
        self._inbox.put(None)

    def stop(self) -> None:
        """The same, and the thread has ended."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(30)

    def submit(self, jobs: Sequence[Job]) -> None:
        """All of them, or none: a `Failure` where there is no room."""
        if len(jobs) > self.most_jobs:
            raise Failure(400, f"{len(jobs)} texts are more than the {self.most_jobs} that fit here: ask for fewer")
        if self.failure or self._is_ending:
            raise Failure(503, self.failure or SHUTTING_DOWN, code="unavailable")
        with self._lock:
            if self._is_closed:  # since the line above
                raise Failure(503, self.failure or SHUTTING_DOWN, code="unavailable")
            if self._count + len(jobs) > self.most_jobs:
                words = f"the queue is full ({self._count} requests): try again later"
                raise Failure(429, words, kind="rate_limit_error", code="queue_full")
            self._count += len(jobs)
            for job in jobs:
                job.arrived_s = self.clock()
                self._inbox.put(job)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """From any thread; one that has ended stays as it is."""
        with self._lock:
            self._cancelled.update(job for job in jobs if not job.is_over)
        self._inbox.put(None)  # wakes the thread where it waits

    @property
    def gauges(self) -> dict[str, float]:
        scheduler = self.engine.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": max(0, self._count - len(scheduler.running)),
            "pages_free": scheduler.pages.free,
            "pages_total": scheduler.pages.count,
            "up": float(not self.failure),
        }

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._take_in(wait=self.engine.scheduler.is_idle and not self._cancelled)
                self._give_up_old()
                if not self.engine.scheduler.is_idle:
                    self._step()
        except BaseException as error:
            self.failure = f"the engine failed: {type(error).__name__}: {str(error)[:200]}"
            self._close(Failure(500, self.failure))
            raise
        self._close(Failure(503, SHUTTING_DOWN, code="unavailable"))

    def _close(self, failure: Failure) -> None:
        """Nobody looks into the inbox any more, so nothing may come in behind this."""
        with self._lock:
            self._is_closed = True
        left = list(self._jobs.values())
        with suppress(queue.Empty):
            while True:
                left += [job for job in (self._inbox.get(block=False),) if job is not None]
        for job in left:
            if not job.is_over:
                self._end(job, Event(failure=failure))

    def _take_in(self, *, wait: bool) -> None:
        while True:
            try:
                job = self._inbox.get(block=wait)
            except queue.Empty:
                break
            wait = False
            if job is not None:
                self._begin(job)
        with self._lock:
            gone, self._cancelled = self._cancelled, set()
        for job in gone:
            if not job.is_over:
                self.metrics.count("cancelled")
                self._end(job, None)

    def _begin(self, job: Job) -> None:
        if job.is_over:  # it was cancelled between the look into the inbox and the one at what is cancelled
            return None
        writer = job.writer = Writer(self.words, job.stops, job.prompt if job.goes_on else ())
        job.request = Request(list(job.prompt), job.most_new, job.sampling, job.ends, with_prompt=job.with_prompt)
        job.request.is_stopped = lambda new: writer.add(new[-1])
        if self._is_ending:
            return self._end(job, Event(failure=Failure(503, SHUTTING_DOWN)))
        try:
            job.text = self.engine.add(job.request)
        except BadInput as error:
            return self._end(job, Event(failure=Failure(400, str(error))))
        self.metrics.count("prompt_tokens", len(job.prompt))
        self._jobs[job.request] = job
        return None

    def _give_up_old(self) -> None:
        now = self.clock()
        for job in [job for job in self._jobs.values() if now - job.arrived_s > self.most_s]:
            self.metrics.count("timed_out")
            words = f"not done within {self.most_s:g} s: ask for fewer tokens, or try when there is less to do"
            self._end(job, Event(failure=Failure(504, words, kind="timeout", code="timeout")))

    def _step(self) -> None:
        try:
            tokens = self.engine.step()
        except Exception as error:  # an error of the device may pass; texts whose step is lost cannot go on
            failure = Failure(500, f"the engine failed at this request: {type(error).__name__}")
            for job in list(self._jobs.values()):
                self._end(job, Event(failure=failure))
            self.engine.reset()  # raises where the device is gone: then the thread gives up
            return
        self.metrics.count("steps")
        self.metrics.count("new_tokens", len(tokens))
        now = self.clock()
        events: list[tuple[Emit, Event]] = []
        for request, token in tokens:
            job = self._jobs[request]
            if request.finish == "failed":
                self._end(job, Event(failure=Failure(500, NO_NUMBERS)))
                continue
            of_prompt: tuple[Logprobs, ...] = ()
            if len(request.new) == 1:
                self.metrics.first_token(now - job.arrived_s)
                of_prompt = tuple(request.prompt_logprobs)
            assert job.writer is not None
            text = job.writer.end() if request.finish else job.writer.take()
            logprobs = tuple(request.logprobs[-1:])
            made = Event(
                text=text, tokens=(token,), logprobs=logprobs, prompt_logprobs=of_prompt, finish=request.finish
            )
            events.append((job.emit, made))
            if request.finish:
                self._forget(job)
        self._deliver(events)

    def _end(self, job: Job, event: Event | None) -> None:
        """Before its time: pages are free at once."""
        if job.text is not None and not job.text.is_over:
            self.engine.cancel(job.text)
        self._forget(job)
        if event is not None:
            self._deliver([(job.emit, event)])

    def _forget(self, job: Job) -> None:
        job.is_over = True
        if job.request is not None:
            self._jobs.pop(job.request, None)
        if job.text is not None:
            self.metrics.count("reused_tokens", job.text.reused)
            self.metrics.count("preempted", job.text.preempted)
        self.metrics.ended(self.clock() - job.arrived_s)
        with self._lock:
            self._count -= 1
