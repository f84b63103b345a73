"""Parts of `unsilent.engine.trace`: observing outputs, comparing runs, restoring state between runs."""
