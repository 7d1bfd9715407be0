"""Known: the CPU time of a forked child and of a started one, by what each computes: 2 : 1."""

import json
import multiprocessing
import sys
import time


def forked_job(queue: object) -> None:
    began = time.thread_time()
    total = 0
    for number in range(3_000_000):
        total += number * number % 7
    queue.put(("forked_job", time.thread_time() - began))


def started_job(queue: object) -> None:
    began = time.thread_time()
    total = 0
    for number in range(1_500_000):
        total += number * number % 7
    queue.put(("started_job", time.thread_time() - began))


if __name__ == "__main__":
    spent = {}
    for method, job in (("fork", forked_job), ("spawn", started_job)):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=job, args=(queue,))
        child.start()
        name, took = queue.get()
        child.join()
        spent[name] = took
    whole = sum(spent.values())
    print(json.dumps({"cpu_shares": {name: took / whole for name, took in spent.items()}}), file=sys.stderr)
