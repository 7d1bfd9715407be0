"""`python3 -m sublight`, and what the installed command runs: Ctrl-C while it is still importing is one line, too."""

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


if __name__ == "__main__":
    main()
