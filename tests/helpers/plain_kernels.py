"""The kernels of a block in plain PyTorch."""

import torch
import torch.nn.functional as F
from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.block import launch as kernels


def gradients(function, inputs, dy):
    """Gradients of `function(*inputs)` by autograd, None for inputs that are None."""
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = function(*inputs)
    found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return [None if t is None else next(found) for t in inputs]


class PlainKernels:
    """The kernels that the fused block calls, in plain PyTorch; their gradients by autograd."""

    @staticmethod
    def fuses_product(x, D, dtype):
        return False

    @staticmethod
    def runs_hopper_kernels(T, C, D, dtype, device):
        return True

    @staticmethod
    def empty_tiles(T, out_proj, dtype):
        return None

    @staticmethod
    def rms_norm(x, eps, dtype, copy):
        scale = (x.square().mean(-1) + eps).rsqrt()
        return (x * scale[:, None]).to(dtype), scale, x.clone()

    @staticmethod
    def pack(norm, in_proj, out_proj, directions, dtype):
        half = len(directions) // 2
        conv, conv_bias, x_proj, step, step_bias, skip = [
            torch.stack(pair).to(dtype) for pair in list(zip(directions[:half], directions[half:]))[:6]
        ]
        rank = step.shape[2]
        x_proj = torch.cat([F.pad(x_proj[:, :rank], (0, 0, 0, -rank % 8)), x_proj[:, rank:]], 1)
        step = F.pad(step, (0, -rank % 8))
        return [in_proj * norm, out_proj.clone(), x_proj, step, conv.squeeze(2), conv_bias, step_bias, skip]

    packed_sizes, packed_size = staticmethod(kernels.packed_sizes), staticmethod(kernels.packed_size)
    unflatten = staticmethod(kernels.unflatten)

    @classmethod
    def pack_weights(cls, norm, in_proj, out_proj, directions, dtype, tiles, x, eps, copy):
        sizes = kernels.packed_sizes(out_proj, directions)
        packed = out_proj.new_zeros(kernels.packed_size(*sizes, dtype), dtype=dtype)
        for part, value in zip(
            kernels.Weights.of(packed, *sizes), cls.pack(norm, in_proj, out_proj, directions, dtype)
        ):
            part.copy_(value)
        return packed, [None] * 3 if x is None else list(cls.rms_norm(x, eps, dtype, copy))

    @classmethod
    def unpack_gradients(
        cls, norm, in_proj, directions, dfolded, dfilters, dx_proj, dstep, dchannels, dtype, flat=False
    ):
        half = len(directions) // 2

        def one(norm, in_proj, *directions):
            folded, _, *rest = cls.pack(norm, in_proj, in_proj, directions, dtype)
            return torch.cat([t.flatten() for t in (folded, *rest)])

        dfilters, dx_proj, dstep = dfilters.sum(0), dx_proj.sum(1), dstep.sum(1)
        dskip, dstep_bias = dchannels.unbind(1)
        packed = dfolded, dx_proj, dstep, dfilters[:, :-1].mT, dfilters[:, -1], dstep_bias, dskip
        weights = [norm, in_proj, *directions[:6], *directions[half : half + 6]]
        found = gradients(one, weights, torch.cat([t.flatten() for t in packed]))
        return [torch.cat([t.flatten() for t in found])] if flat else found

    @staticmethod
    def norm_backward(dxhat, xhat, scale, dresidual):
        dx = dresidual + scale[:, None] * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))
        return dx, dx

    @staticmethod
    def convolve(u, conv, conv_bias):
        def one(u, weight, bias):
            taps = weight.shape[1]
            return F.silu(F.conv1d(F.pad(u.mT, (taps - 1, 0)), weight[:, None], bias, groups=len(weight)).mT)

        return torch.stack([one(u, conv[0], conv_bias[0]), one(u.flip(1), conv[1], conv_bias[1]).flip(1)])

    @classmethod
    def conv_xproj(cls, u, conv, conv_bias, x_proj, step_proj, H, logits=True):
        v = cls.convolve(u, conv, conv_bias)
        v = torch.stack([v[0, :, :H], v[1, :, -H:]])
        projected = v.flatten(1, 2) @ x_proj.mT
        return v, projected, projected[..., : step_proj.shape[2]] @ step_proj.mT

    @staticmethod
    def schedule_scan(recurrence, u, H, x_proj, step_proj):
        return None, False

    @staticmethod
    def dt_proj_backward(dlogits, step, step_proj, dk, dq):
        return torch.cat([dlogits @ step_proj, dk, dq], dim=-1), (dlogits.mT @ step)[:, None]

    @staticmethod
    def products_over_tokens(a, b):
        return (a.mT @ b)[:, None]

    @classmethod
    def conv_backward(cls, u, dv, dprojected, x_proj, conv, conv_bias, du):
        dv = dv + (dprojected @ x_proj).view_as(dv)
        others = u.shape[1] - dv.shape[2]
        dv = torch.stack([F.pad(dv[0], (0, 0, 0, others)), F.pad(dv[1], (0, 0, others, 0))])
        found, dconv, dconv_bias = gradients(cls.convolve, [u, conv, conv_bias], dv)
        du.copy_(found)
        return torch.cat([dconv.mT, dconv_bias[:, None]], 1)[None]

    @staticmethod
    def gate(y, z, scale, keep):
        mean = y.mean(0)
        return mean * F.silu(z) * (1 if scale is None else scale[:, None, None]), mean

    @classmethod
    def gate_outproj(cls, x, y, z, scale, out_proj, tiles, keep, eps):
        gated, mean = cls.gate(y, z, scale, keep)
        out = x + gated.flatten(0, 1) @ out_proj.t()
        return out, mean, [] if eps is None else list(cls.rms_norm(out, eps, out.dtype, False)[:2])

    @classmethod
    def gate_backward(cls, dgated, mean, z, scale, dy, dz):
        def one(mean, z):
            return cls.gate(mean[None], z, scale, True)[0]

        dmean, found = gradients(one, [mean, z], dgated)
        dy.copy_(dmean / 2)
        dz.copy_(found)
        return one(mean, z)

    @classmethod
    def gate_outproj_backward(cls, dout, out_proj, mean, z, scale, dy, dz):
        return cls.gate_backward((dout @ out_proj).view_as(mean), mean, z, scale, dy, dz)

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
        return *found, torch.stack([dskip, dbias], 1)


def in_tiles(out_proj):
    """The weights as wgmma reads them: 32 channels of all outputs after another, in rows of 64 bytes."""
    (C, D), outputs = out_proj.shape, torch.arange(len(out_proj))
    place = outputs // 16 * 16 + outputs % 4 // 2 * 8 + outputs % 16 // 4 * 2 + outputs % 2
    eighths = torch.arange(4) ^ place[:, None] // 2 % 4
    tiles = torch.empty(D // 32, C, 4, 8, device=out_proj.device, dtype=out_proj.dtype)
    tiles[:, place[:, None], eighths] = out_proj.view(C, D // 32, 4, 8).transpose(0, 1)
    return tiles.view(C, D)
