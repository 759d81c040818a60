"""What the console script calls: it imports nothing first, so that Ctrl-C while torch is imported is quiet.

It stands beside the package, whose own `__init__` imports torch.
"""

import os
import signal
import sys


def main() -> None:
    """The command `fedbatchnorm`."""
    for number in range(3):  # a file that is opened must not become the standard output of anything
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # ends the process at once: there is nothing to save
    from fedbatchnorm.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    sys.exit(main())
