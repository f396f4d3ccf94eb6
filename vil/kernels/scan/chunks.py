"""Chunks of tokens: between them the scan's forward saves its state for backward, on every backend with kernels."""

CHUNK = 64  # tokens: with N = 16 the states take at most a byte for each element of x


def chunk_state_count(L: int) -> int:
    """The states between the chunks of L tokens; the one before the first chunk is zero and is not saved."""
    return max(L - 1, 0) // CHUNK
