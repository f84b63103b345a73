"""Parts of `unsilent.engine.trace`: the mode that sees every output, comparing two of them, state put back between runs."""
