"""Chunks of tokens, between which forward saves the state for backward in every backend with kernels."""

CHUNK = 64  # tokens; with N = 16, the saved states take at most a byte for each element of x


def chunk_state_count(L: int) -> int:
    """Return the number of states between the chunks of L tokens. The zero state before the first chunk is not
    saved.
    """
    return max(L - 1, 0) // CHUNK
