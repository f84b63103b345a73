"""``python -m unsilent``."""

from unsilent.cli.main import main

if __name__ == "__main__":
    main()
