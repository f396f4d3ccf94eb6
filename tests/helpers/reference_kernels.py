"""Reference implementations of the kernels of a block, in plain PyTorch."""

import torch

from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.block import (
    conv_backward,
    conv_xproj,
    gate,
    gate_outproj,
    gate_outproj_bwd_sm90,
    norm_backward,
    pack_weights,
    pool,
    pooled_conv_backward,
    step_proj_bwd,
    sum_lines,
    unpack_gradients,
)  # fmt: skip
from vil.kernels.block.reference import gradients


class ReferenceKernels:
    """Stand-in for the kernels that a block's forward and backward call: unfused reference implementations."""

    GateInputs, sum_lines = gate.GateInputs, staticmethod(sum_lines.reference)
    packed_size = staticmethod(pack_weights.packed_size)
    rms_norm, norm_backward = staticmethod(norm_backward.reference_norm), staticmethod(norm_backward.reference)
    pack, pack_weights = staticmethod(pack_weights.reference_packed), staticmethod(pack_weights.reference)
    unpack_gradients = staticmethod(unpack_gradients.reference)
    conv_xproj, conv_backward = staticmethod(conv_xproj.reference), staticmethod(conv_backward.reference)
    step_proj_backward = staticmethod(step_proj_bwd.reference)
    gate, gate_backward = staticmethod(gate.reference), staticmethod(gate.reference_backward)
    gate_outproj = staticmethod(gate_outproj.reference)
    gate_outproj_backward = staticmethod(gate_outproj_bwd_sm90.reference)

    fuses_product, runs_hopper_kernels = staticmethod(lambda *_: False), staticmethod(lambda *_: True)
    empty_tiles, schedule_scan = staticmethod(lambda *_: None), staticmethod(lambda *_: (None, False))
    line_scan = staticmethod(lambda *_: None)
    backpropagates_lines, empty_in_proj_tiles = staticmethod(lambda *_: False), staticmethod(lambda *_: None)
    pool, pooled_conv_backward = staticmethod(pool.reference), staticmethod(pooled_conv_backward.reference)
    add_product = staticmethod(lambda x, a, b: x + a @ b)

    @staticmethod
    def scan_forward(recurrence, x, logits, k, q, rates, skip, bias, reverse, keep, schedule=None, step_proj_GDR=None):
        if recurrence == "longhorn":
            return longhorn_scan(x, logits, k, q, skip, bias, reverse=reverse, backend="reference"), x.new_empty(0)
        y = selective_scan(x, logits, rates, k, q, skip, bias, reverse=reverse, backend="reference")
        return y, x.new_empty(0)

    @classmethod
    def scan_backward(
        cls, recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse, overwrite_step_logits=False
    ):
        def one(*inputs):
            return cls.scan_forward(recurrence, *inputs, reverse, False)[0]

        *found, dskip, dbias = gradients(one, [x, logits, k, q, rates, skip, bias], dy)
        return *found, torch.stack([dbias if dskip is None else dskip, dbias], 1)


def in_tiles(out_proj):
    """Return the weights of out_proj in the tiled memory layout that gate_outproj_sm90.cu reads.

    Each tile has 32 input channels and all output channels, in rows of 64 bytes.
    """
    (C, D), outputs = out_proj.shape, torch.arange(len(out_proj))
    place = outputs // 16 * 16 + outputs % 4 // 2 * 8 + outputs % 16 // 4 * 2 + outputs % 2
    eighths = torch.arange(4) ^ place[:, None] // 2 % 4
    tiles = torch.empty(D // 32, C, 4, 8, device=out_proj.device, dtype=out_proj.dtype)
    tiles[:, place[:, None], eighths] = out_proj.view(C, D // 32, 4, 8).transpose(0, 1)
    return tiles.view(C, D)
