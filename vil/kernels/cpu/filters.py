"""Causal depthwise convolutions of CPU kernels, of both directions at once.

`window` is a ring buffer of `WINDOW` tokens of `LANES` channels, and `weights` (2 * taps, LANES) has the filters.
"""

from __future__ import annotations

from .compiler import LANES
from .language import BYTES, ZERO, inlined, load_rows, row, spliced

AHEAD = 4  # kernels prefetch the memory of the token that is `AHEAD` tokens after the current token
WINDOW = 8  # number of tokens in a ring buffer: a power of 2 that covers the convolution taps of both directions


@inlined
def take_filters(weights0, bias0, weights1, bias1, first, width, taps, weights, bias):
    """Copy both directions' biases and transposed filters, (taps, channels), for a block of channels."""
    for g in range(2):
        source = row((weights1 if g else weights0) + BYTES * first * taps, width * taps)
        for i in range(taps):
            for d in range(width):
                weights[g * taps + i, d] = source[d * taps + i]
            for d in range(width, LANES):
                weights[g * taps + i, d] = ZERO
        load_rows((bias1 if g else bias0) + BYTES * first, 0, width, 1, bias[g : g + 1])


def convolution(taps: int):
    """Build a function that computes the convolutions of both directions at token t.

    Tap i reads token t - (taps - 1 - i) in direction 0, and token t + (taps - 1 - i) in direction 1.
    """

    @spliced
    def convolve(weights, bias, window, t, convolved):
        for d in range(LANES):
            earlier, later = bias[0, d], bias[1, d]
            for i in range(taps):
                earlier += weights[i, d] * window[(t - (taps - 1) + i) % WINDOW, d]
                later += weights[taps + i, d] * window[(t + (taps - 1) - i) % WINDOW, d]
            convolved[0, d] = earlier
            convolved[1, d] = later

    return convolve


def filter_gradients(taps: int):
    """Build a function that adds token t's gradients of both directions' filters and biases to `sums`.

    `before` and `behind` have the gradients of the convolutions' outputs, one buffer per direction.
    """

    @spliced
    def add_filter_gradients(before, behind, window, t, sums):
        second = sums.shape[0] // 2
        for d in range(LANES):
            for i in range(taps):
                sums[i, d] += before[t % WINDOW, d] * window[(t - (taps - 1) + i) % WINDOW, d]
            sums[taps, d] += before[t % WINDOW, d]
        for d in range(LANES):
            for i in range(taps):
                sums[second + i, d] += behind[t % WINDOW, d] * window[(t + (taps - 1) - i) % WINDOW, d]
            sums[second + taps, d] += behind[t % WINDOW, d]

    return add_filter_gradients


def token_gradient(taps: int):
    """Build a function that computes token t's gradient from the gradients of all convolutions that read the token."""

    @spliced
    def compute_token_gradient(weights, before, behind, t, du):
        for d in range(LANES):
            total = ZERO
            for i in range(taps):
                total += weights[i, d] * before[(t + (taps - 1) - i) % WINDOW, d]
                total += weights[taps + i, d] * behind[(t - (taps - 1) + i) % WINDOW, d]
            du[d] = total

    return compute_token_gradient
