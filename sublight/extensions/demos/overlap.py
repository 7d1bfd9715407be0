"""Copies in, kernels and copies out at the same time, each kind on a stream of its own, held in order by events.

A chunk's kernel waits for its copy by an event, its copy out for its kernel. So each stream is one engine of the GPU,
and what stands between two events of a stream is that engine's own time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap

from sublight.extensions.demos.demo import Demo, Figures, Span, Table, Timeline
from sublight.extensions.demos.gpu import Buffer, Gpu

CHUNKS, CHUNK_BYTES = 8, 2**25
BLOCKS, THREADS = 1024, 256
LANES = ("copy in", "kernel", "copy out")


def run(gpu: Gpu) -> Figures:
    pages = mmap.mmap(-1, CHUNKS * CHUNK_BYTES)
    pageable = Buffer(ctypes.addressof(ctypes.c_char.from_buffer(pages)), CHUNKS * CHUNK_BYTES)
    ctypes.memset(pageable.address, 0, pageable.bytes)
    pinned, device = gpu.pinned(CHUNKS * CHUNK_BYTES), gpu.buffer(CHUNKS * CHUNK_BYTES)
    rounds = _rounds_like_a_copy(gpu, device.at(0, CHUNK_BYTES), pinned.at(0, CHUNK_BYTES))
    one, three = [gpu.stream()] * 3, [gpu.stream() for _ in range(3)]
    timelines = [
        _timeline(gpu, title, host, device, streams, rounds)
        for title, host, streams in (
            ("one stream", pinned, one),
            ("a stream for each engine, pinned memory", pinned, three),
            ("a stream for each engine, pageable memory", pageable, three),
        )
    ]
    rows = []
    for timeline in timelines:
        whole = max(span.start_s + span.elapsed_s for span in timeline.spans)
        busy = {lane: sum(span.elapsed_s for span in timeline.spans if span.lane == lane) for lane in LANES}
        rows.append((timeline.title, whole, sum(busy.values()) / whole, *busy.values()))
    table = Table(
        title=f"{CHUNKS} chunks of {CHUNK_BYTES / 1e6:.0f} MB: copied in, worked on, copied out",
        columns=(("streams", ""), ("in all", "s"), ("at a time", "number"), *((lane, "s") for lane in LANES)),
        rows=tuple(rows),
        note="At a time: how many of the three engines were busy on average. Times of copies and kernels are summed.",
    )
    return Figures(tables=(table,), timelines=tuple(timelines))


def _rounds_like_a_copy(gpu: Gpu, device: Buffer, pinned: Buffer) -> int:
    """How many rounds make a kernel that takes as long as one chunk's copy."""
    copy_s = gpu.time(lambda: gpu.copy_to_gpu(device, pinned), times=5)
    count, rounds = CHUNK_BYTES // 4, 1000
    kernel_s = gpu.time(lambda: gpu.launch("work", BLOCKS, THREADS, device, count, rounds), times=5)
    return max(1, round(rounds * copy_s / kernel_s))


def _timeline(gpu: Gpu, title: str, host: Buffer, device: Buffer, streams: list[int], rounds: int) -> Timeline:
    """The timeline of the second turn; a first one warms up."""
    for _turn in range(2):
        gpu.synchronize()
        marks = []
        for chunk in range(CHUNKS):
            mine = host.at(chunk * CHUNK_BYTES, CHUNK_BYTES)
            there = device.at(chunk * CHUNK_BYTES, CHUNK_BYTES)
            steps = (
                functools.partial(gpu.copy_to_gpu, there, mine),
                functools.partial(gpu.launch, "work", BLOCKS, THREADS, there, CHUNK_BYTES // 4, rounds),
                functools.partial(gpu.copy_to_host, mine, there),
            )
            done = None
            for lane, stream, step in zip(LANES, streams, steps, strict=True):
                if done is not None:
                    gpu.wait_for(done, stream)
                start, end = gpu.event(), gpu.event()
                gpu.record(start, stream)
                step(stream=stream)
                gpu.record(end, stream)
                marks.append((lane, chunk, start, end))
                done = end
        gpu.synchronize()
    first = marks[0][2]
    spans = [
        Span(lane=lane, name=f"{chunk}", start_s=gpu.between(first, start), elapsed_s=gpu.between(start, end))
        for lane, chunk, start, end in marks
    ]
    return Timeline(title=title, spans=tuple(spans))


OVERLAP = Demo(
    name="overlap",
    question="How do copies and kernels run at the same time, and what keeps them from it?",
    expect="On one stream everything follows everything: the sum of all times. With a stream for each engine, and "
    "events that let a chunk's kernel wait for its copy, the three engines work at the same time, each on another "
    "chunk: less than half of the sum with eight chunks, towards a third with more. From pageable memory a copy is not "
    "asynchronous: the host itself stands in it, launches come late, and most of the overlap is lost.",
    run=run,
    source="../demos/overlap.cu",
    kernels=("work",),
)
