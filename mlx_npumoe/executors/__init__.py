"""The places where a (token, expert) pair can be computed, one file each."""
