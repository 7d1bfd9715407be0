"""What Prometheus reads: counters, gauges and one kind of histogram, as text."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """How many took at most each of SECONDS.

    >>> some = Histogram()
    >>> some.add(0.03)
    >>> some.below[:4], some.count
    ([0, 0, 1, 1], 1)
    """

    def __init__(self) -> None:
        self.below, self.sum, self.count = [0] * len(SECONDS), 0.0, 0

    def add(self, seconds: float) -> None:
        self.below = [count + (seconds <= edge) for count, edge in zip(self.below, SECONDS, strict=True)]
        self.sum, self.count = self.sum + seconds, self.count + 1


class Metrics:
    """Counted from the web's thread and from the engine's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._answers: Counter[tuple[str, int]] = Counter()
        self._first, self._whole = Histogram(), Histogram()

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def answered(self, path: str, status: int) -> None:
        with self._lock:
            self._answers[path, status] += 1

    def first_token(self, seconds: float) -> None:
        with self._lock:
            self._first.add(seconds)

    def ended(self, seconds: float) -> None:
        with self._lock:
            self._whole.add(seconds)

    def text(self, gauges: Mapping[str, float]) -> str:
        with self._lock:
            lines = ["# TYPE sublight_answers_total counter"]
            lines += [
                f'sublight_answers_total{{path="{path}",status="{status}"}} {count}'
                for (path, status), count in sorted(self._answers.items())
            ]
            for name in (
                "prompt_tokens",
                "new_tokens",
                "reused_tokens",
                "cancelled",
                "timed_out",
                "preempted",
                "steps",
            ):
                lines += [f"# TYPE sublight_{name}_total counter", f"sublight_{name}_total {self._counts[name]}"]
            for name, value in gauges.items():
                lines += [f"# TYPE sublight_{name} gauge", f"sublight_{name} {value:.15g}"]
            for name, seen in (("first_token_seconds", self._first), ("request_seconds", self._whole)):
                lines.append(f"# TYPE sublight_{name} histogram")
                edges = zip(SECONDS, seen.below, strict=True)
                lines += [f'sublight_{name}_bucket{{le="{edge:g}"}} {count}' for edge, count in edges]
                lines.append(f'sublight_{name}_bucket{{le="+Inf"}} {seen.count}')
                lines += [f"sublight_{name}_sum {seen.sum:.15g}", f"sublight_{name}_count {seen.count}"]
        return "\n".join(lines) + "\n"
