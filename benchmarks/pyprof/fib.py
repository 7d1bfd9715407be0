"""For the overhead of tracers: nothing but calls."""

import json
import sys
import time


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


began = time.process_time()
fib(29)
print(json.dumps({"cpu_s": time.process_time() - began}), file=sys.stderr)
