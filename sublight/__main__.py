"""`python3 -m sublight`: the command, from a bare checkout."""

from sublight.cli.main import main

if __name__ == "__main__":
    main()
