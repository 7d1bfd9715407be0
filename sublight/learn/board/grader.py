"""The judge's process: one order a line in, one verdict a line out. Run as `python -m sublight.learn.board.grader`.

It holds the reference and reads results, outside of the sandbox that runs submissions, and knows neither the database
nor a token. A sandbox serves several submissions as long as none leaves anything behind: a process, a file, a broken
limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from typing import Any

from sublight.errors import BadInput
from sublight.learn.board import processes
from sublight.learn.board.jail import Jail
from sublight.learn.exercises import find
from sublight.learn.target import DEFAULT

KNOWN = "copy"  # an exercise whose solution the grader tries itself on, before anybody's code
MAKERS = {"namespaces": 1, "bubblewrap": 2}  # processes that make a sandbox
READY = (2, 1)  # processes that stand ready inside: in the first sandbox, and in the one with a GPU


class Bench:
    """The sandbox at hand, made anew where the last one cannot be used again."""

    def __init__(self, base: Jail) -> None:
        self.base, self.number = base, 0
        self.crew: Any = None

    def take(self) -> Any:
        from sublight.learn.grade.crew import Crew

        if self.crew is None:
            self.number += 1
            jail = Jail(way=self.base.way, user=self.base.user, home=os.path.join(self.base.home, str(self.number)))
            os.mkdir(jail.home, 0o711)
            jail.make()
            self.crew = Crew(jail)
        return self.crew

    def is_clean(self) -> bool:
        """Nothing in it but what was there before a submission came."""
        me, rooms = os.getpid(), self.crew.rooms
        wanted = sum(MAKERS[self.base.way] + ready for ready, _ in zip(READY, rooms, strict=False))
        is_alone = len(processes.below(me)) == processes.awake(me) == wanted
        return is_alone and not any(map(os.listdir, rooms))

    def drop(self) -> None:
        if self.crew is not None:
            home, crew, self.crew = self.crew.sandbox.home, self.crew, None
            with contextlib.suppress(OSError):
                crew._process.kill()  # and with it, all inside
            crew.close()
            shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else is printed among the answers
    order = json.loads(sys.stdin.readline())
    bench = Bench(Jail(**order["jail"]))
    missing = _prepared(bench)
    print(json.dumps({"ready": missing, "not_timed": "" if missing else _not_timed(bench)}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _graded(bench, order)
        print(json.dumps(answer), file=out, flush=True)
    bench.drop()


def _prepared(bench: Bench) -> str:
    """Empty where a solution of ours passes here; else why not: then no submission is to blame for what fails."""
    try:
        import torch  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        return f"this server has no {error.name}"
    answer = _graded(bench, {"exercise": KNOWN, "source": find(KNOWN).solution(), "gpu": DEFAULT, "budget": {}})
    if "failure" in answer:
        return str(answer["failure"])
    faults = [fault["text"] for fault in answer["verdict"]["faults"]]
    return f"our own solution of {KNOWN} fails here: {faults[0]}" if faults else ""


def _not_timed(bench: Bench) -> str:
    """Empty where this machine has a GPU and a solution of ours is timed on it, in a sandbox; else why not, and then
    nothing is: the same would be tried for every entry."""
    from sublight.gpus import detect

    here, reason = detect(), "this server has no GPU"
    if here is not None and here.compute_capability:
        answer = _graded(bench, {"exercise": KNOWN, "source": find(KNOWN).solution(), "gpu": here.key, "budget": {}})
        if (answer.get("verdict") or {}).get("timed"):
            return ""
        verdict = answer.get("verdict") or {"faults": [{"text": answer["failure"]}], "notes": []}
        words = [*verdict["notes"], *(fault["text"] for fault in verdict["faults"])]
        reason = words[0] if words else "the sandbox cannot have the GPU's devices"
    os.environ["SUBLIGHT_LEARN_TIME"] = "0"
    bench.drop()
    return reason


def _graded(bench: Bench, order: dict[str, Any]) -> dict[str, Any]:
    from sublight.gpus import find as find_gpu
    from sublight.learn.grade.check import check
    from sublight.learn.grade.sandbox import Budget

    is_kept = False
    try:
        verdict = check(
            find(order["exercise"]),
            order["source"],
            crew=bench.take(),
            gpu=find_gpu(order["gpu"]),
            budget=Budget(**order["budget"]),
        )
        is_kept = bench.is_clean() and all(fault.kind != "limit" for fault in verdict.faults)
        return {"verdict": verdict.to_json()}
    except BadInput as error:
        return {"failure": str(error)}
    except RecursionError:
        return {"failure": "it is nested too deeply"}
    except Exception as error:  # an answer that is none of ours, from code that got past the scan
        return {"failure": f"its process answered what no grader does ({type(error).__name__})"}
    finally:
        if not is_kept:
            bench.drop()


if __name__ == "__main__":
    main()
