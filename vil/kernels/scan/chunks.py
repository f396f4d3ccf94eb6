"""Chunks of tokens. Forward saves the state between chunks, from which backward recomputes all other states."""

CHUNK = 64  # tokens per chunk; for 16 states, the saved states take at most one byte per element of x


def chunk_state_count(L: int) -> int:
    """Return the number of states that forward saves for L tokens, one between adjacent chunks."""
    return max(L - 1, 0) // CHUNK
