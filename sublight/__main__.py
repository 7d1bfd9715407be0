"""`python3 -m sublight`, and what the installed command runs: Ctrl-C while it is still importing is one line, too."""

import os
import signal
import sys


def main() -> None:
    status = 130  # what a shell reports of a command that Ctrl-C ended
    try:
        from sublight.cli.main import run

        status = run()
    except KeyboardInterrupt:
        print("sublight: interrupted", file=sys.stderr)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the results are out: from here on Ctrl-C just ends the process
    sys.exit(status)


def _leave_out_working_folder() -> None:
    """`-m` puts it first on the path, the installed command does not: a copy.py there is no module of Python's."""
    ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir) != ours:
        del sys.path[0]


if __name__ == "__main__":
    _leave_out_working_folder()
    main()
