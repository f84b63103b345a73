"""The ``unsilent`` command, also as ``python -m unsilent``.

Ctrl-C ends it with one line, even while its modules are being imported.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run one command; never returns."""
    try:
        from unsilent.cli.main import main as run_command

        run_command()
    except KeyboardInterrupt:
        print("unsilent: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
