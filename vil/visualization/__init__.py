"""Visualization of what a ViL or ViM uses: evidence for a class, scan traces and receptive fields.

Only the plots need matplotlib. docs/seeing-inside.md explains the plots.

Dimension letters in the suffixes of tensor names:

    B images    G = 2 scan directions (forward, backward)    L tokens    D channels    N states
    T tokens in scan order    H, W image size    h, w patch grid
"""

from .evidence import class_evidence, deletion_curve, effective_receptive_field, patch_sums
from .plots import plot_receptive_fields, plot_scans, plot_why
from .traces import Trace, patch_maps, reading, trace_scans

__all__ = [
    "Trace", "class_evidence", "deletion_curve", "effective_receptive_field", "patch_maps", "patch_sums",
    "plot_receptive_fields", "plot_scans", "plot_why", "reading", "trace_scans",
]  # fmt: skip
