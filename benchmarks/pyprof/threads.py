"""Known: CPU time of two threads that compete for the interpreter's lock, 2 : 1; a third sleeps all along."""

import json
import sys
import threading
import time

SPENT = {"long_job": 0.0, "short_job": 0.0}


def long_job(n: int) -> None:
    began = time.thread_time()
    total = 0
    for number in range(n):
        total += number * number % 7
    SPENT["long_job"] = time.thread_time() - began


def short_job(n: int) -> None:
    began = time.thread_time()
    total = 0
    for number in range(n):
        total += number * number % 7
    SPENT["short_job"] = time.thread_time() - began


def sleeper() -> None:
    time.sleep(0.5)


threads = [
    threading.Thread(target=long_job, args=(4_000_000,)),
    threading.Thread(target=short_job, args=(2_000_000,)),
    threading.Thread(target=sleeper),
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
whole = sum(SPENT.values())
print(json.dumps({"cpu_shares": {name: spent / whole for name, spent in SPENT.items()}}), file=sys.stderr)
