"""Chunks of tokens. In every backend with kernels, forward saves the state between chunks for backward."""

CHUNK = 64  # tokens per chunk; with N = 16, the saved states take at most one byte per element of x


def chunk_state_count(L: int) -> int:
    """Return the number of states between the chunks of L tokens. The zero state before the first chunk is not
    saved.
    """
    return max(L - 1, 0) // CHUNK
