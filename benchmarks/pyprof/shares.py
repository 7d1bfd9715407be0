"""Known: `hot` takes three times the CPU of `cold`."""

import json
import sys
import time

SPENT = {"hot": 0.0, "cold": 0.0}


def hot(n: int) -> int:
    began = time.thread_time()
    total = 0
    for number in range(n):
        total += number * number % 7
    SPENT["hot"] += time.thread_time() - began
    return total


def cold(n: int) -> int:
    began = time.thread_time()
    total = 0
    for number in range(n):
        total += number * number % 7
    SPENT["cold"] += time.thread_time() - began
    return total


began = time.process_time()
for _ in range(120):  # a second of CPU: some hundred looks
    hot(150_000)
    cold(50_000)
cpu_s = time.process_time() - began
whole = sum(SPENT.values())
print(json.dumps({"cpu_s": cpu_s, "shares": {name: spent / whole for name, spent in SPENT.items()}}), file=sys.stderr)
