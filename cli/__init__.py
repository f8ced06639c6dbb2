"""The terminal program. Talks HTTP to the daemon and knows nothing else of it."""
