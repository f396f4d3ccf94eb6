"""What the scan's forward keeps for its backward, on any machine: the states between chunks of tokens, in fp32."""

CHUNK = 64  # tokens: with N = 16 the states take at most a byte for each element of x


def boundaries(L: int) -> int:
    """Those between chunks of `L` tokens, where forward keeps a state."""
    return max(L - 1, 0) // CHUNK
