"""Known: `rest` sleeps, `toil` computes; each is seen by the wall clock."""

import json
import sys
import time

SPENT = {"rest": 0.0, "toil": 0.0}


def rest() -> None:
    began = time.perf_counter()
    time.sleep(0.05)
    SPENT["rest"] += time.perf_counter() - began


def toil(n: int) -> int:
    began = time.perf_counter()
    total = 0
    for number in range(n):
        total += number * number % 7
    SPENT["toil"] += time.perf_counter() - began
    return total


for _ in range(30):
    rest()
    toil(250_000)
whole = sum(SPENT.values())
print(json.dumps({"shares": {name: spent / whole for name, spent in SPENT.items()}}), file=sys.stderr)
