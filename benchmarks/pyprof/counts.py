"""Known: how often each function is called: recursion, generators, exceptions, threads, coroutines, builtins."""

import asyncio
import json
import sys
import threading


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def numbers(n: int):
    for number in range(n):
        yield number + 1


def fails() -> None:
    raise ValueError


def tries() -> int:
    try:
        fails()
    except ValueError:
        return abs(-1)
    return 0


def small_step() -> None:
    pass


def job() -> None:
    for _ in range(500):
        small_step()


async def go_on(n: int) -> None:
    if n:
        await asyncio.sleep(0)
        await go_on(n - 1)


async def main() -> None:
    await asyncio.gather(*(go_on(4) for _ in range(10)))


fib(15)
for _ in range(30):
    sum(numbers(10))
for _ in range(40):
    tries()
jobs = [threading.Thread(target=job) for _ in range(4)]
for one in jobs:
    one.start()
for one in jobs:
    one.join()
asyncio.run(main())
KNOWN = {"fib": 1973, "numbers": 30, "fails": 40, "tries": 40, "small_step": 2000, "job": 4, "go_on": 50, "abs": 40}
print(json.dumps({"calls": KNOWN}), file=sys.stderr)
