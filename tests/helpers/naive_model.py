"""Independent implementation of the models, with each direction computed separately on an explicitly flipped sequence.

This module imports only the recurrence's reference implementation from `vil`. Weights are a dictionary with this
package's names or those of ViM's published checkpoints.
"""

import torch
import torch.nn.functional as F

from vil.kernels.scan import reference

OURS = {
    "block": "blocks.{}.",
    "norm": "norm.weight",
    "directions": [
        {
            "conv": f"mixer.directions.{g}.conv1d",
            "x_proj": f"mixer.directions.{g}.x_proj.weight",
            "step": f"mixer.directions.{g}.step_proj",
            "skip": f"mixer.directions.{g}.skip",
            "A_log": f"mixer.directions.{g}.A_log",
        }
        for g in (0, 1)
    ],
}
PUBLISHED = {  # names of the weights in ViM's published checkpoints (github.com/hustvl/Vim)
    "block": "layers.{}.",
    "norm": "norm_f.weight",
    "directions": [
        {
            "conv": f"mixer.conv1d{b}",
            "x_proj": f"mixer.x_proj{b}.weight",
            "step": f"mixer.dt_proj{b}",
            "skip": f"mixer.D{b}",
            "A_log": f"mixer.A{b}_log",
        }
        for b in ("", "_b")
    ],
}


def rms_norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def recurrence_inputs(u, w, names):
    """Return the inputs of one direction's recurrence for tokens u in the direction's order.

    The inputs are v, step logits, k, q, and the decay rates, which are None for Longhorn.
    """
    width, rank = w[names["conv"] + ".weight"].shape[-1], w[names["step"] + ".weight"].shape[1]
    states = (w[names["x_proj"]].shape[0] - rank) // 2
    padded = F.pad(u.transpose(1, 2), (width - 1, 0))
    convolved = F.conv1d(padded, w[names["conv"] + ".weight"], w[names["conv"] + ".bias"], groups=u.shape[-1])
    v = F.silu(convolved).transpose(1, 2)
    b, k, q = F.linear(v, w[names["x_proj"]]).split([rank, states, states], dim=-1)
    logits = F.linear(b, w[names["step"] + ".weight"], w[names["step"] + ".bias"])
    return v, logits, k, q, -torch.exp(w[names["A_log"]]) if names["A_log"] in w else None


def check_known(w):
    """Assert that this module reads all weights of a block, because a block with other weights needs other code."""
    read = {"norm.weight", "mixer.in_proj.weight", "mixer.out_proj.weight"}
    for names in (*OURS["directions"], *PUBLISHED["directions"]):
        read |= {f"{names[name]}.{kind}" for name in ("conv", "step") for kind in ("weight", "bias")}
        read |= {names[name] for name in ("x_proj", "skip", "A_log")}
    unread = sorted(w.keys() - read)
    assert not unread, f"naive_model.py does not read the weights {unread}: implement their recurrence there"


def scan(v, logits, k, q, rates, skip=None):
    if rates is None:
        return reference.longhorn(v, logits, k, q, skip)
    return reference.selective(v, logits, rates, k, q, skip)


def direction(u, w, names):
    """Compute one direction of a mixer on tokens u (B, L, D), which are already in that direction's reading order."""
    return scan(*recurrence_inputs(u, w, names), w[names["skip"]])


def block(x, w, names, scale=None, eps=1e-5):
    """Compute the residual block on tokens (B, L, C). Stochastic depth multiplies each image's update by `scale`."""
    check_known(w)
    u, z = F.linear(rms_norm(x, w["norm.weight"], eps), w["mixer.in_proj.weight"]).chunk(2, dim=-1)
    forward = direction(u, w, names["directions"][0])
    backward = direction(u.flip(1), w, names["directions"][1]).flip(1)
    update = F.linear((forward + backward) / 2 * F.silu(z), w["mixer.out_proj.weight"])
    return x + (update if scale is None else scale[:, None, None] * update)


def block_weights(w, names=OURS):
    """Yield a dict of each block's weights, whose names lack the block's prefix, such as `blocks.0.`"""
    i = 0
    while any(name.startswith(prefix := names["block"].format(i)) for name in w):
        yield {name.removeprefix(prefix): t for name, t in w.items() if name.startswith(prefix)}
        i += 1


def residual_stream(images, w, names=OURS, stride=16, scales=None):
    """Return the tokens (B, L, C) before the first block and after each block."""
    x = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=stride)
    x = x.flatten(2).transpose(1, 2)
    middle = x.shape[1] // 2
    x = torch.cat([x[:, :middle], w["cls_token"].expand(len(x), -1, -1), x[:, middle:]], dim=1) + w["pos_embed"]
    stream = [x]
    for i, weights in enumerate(block_weights(w, names)):
        stream.append(block(stream[-1], weights, names, scales and scales[i]))
    return stream


def patches_and_class_token(tokens):
    """Split tokens (B, L, C) into patches (B, L - 1, C) and class token (B, C)."""
    middle = (tokens.shape[1] - 1) // 2
    return torch.cat([tokens[:, :middle], tokens[:, middle + 1 :]], dim=1), tokens[:, middle]


def model(images, w, names=OURS, stride=16, scales=None, pool="token"):
    """Compute a model's logits for images."""
    patches, class_token = patches_and_class_token(residual_stream(images, w, names, stride, scales)[-1])
    pooled = rms_norm(class_token, w[names["norm"]]) if pool == "token" else rms_norm(patches, w[names["norm"]]).mean(1)
    return F.linear(pooled, w["head.weight"], w["head.bias"])


def published_vim(embed_dim, depth, grid=(14, 14), num_classes=1000, patch_size=16, seed=0):
    """Return random ViM weights with the names, shapes and dtype of the published checkpoints."""
    g = torch.Generator().manual_seed(seed)
    inner, rank, states = 2 * embed_dim, -(-embed_dim // 16), 16

    def normal(*shape):
        return torch.randn(*shape, generator=g) / max(1, shape[-1]) ** 0.5

    w = {
        "cls_token": normal(1, 1, embed_dim),
        "pos_embed": normal(1, grid[0] * grid[1] + 1, embed_dim),
        "patch_embed.proj.weight": normal(embed_dim, 3, patch_size, patch_size) / patch_size,
        "patch_embed.proj.bias": normal(embed_dim),
        "head.weight": normal(num_classes, embed_dim),
        "head.bias": normal(num_classes),
    }
    for i in range(depth):
        layer = f"layers.{i}."
        w[layer + "mixer.in_proj.weight"] = normal(2 * inner, embed_dim)
        for names in PUBLISHED["directions"]:
            w[layer + names["A_log"]] = torch.arange(1, states + 1).log().expand(inner, -1) + 0.1 * normal(
                inner, states
            )
            w[layer + names["skip"]] = 1 + normal(inner)
            w[layer + names["conv"] + ".weight"] = normal(inner, 1, 4)
            w[layer + names["conv"] + ".bias"] = normal(inner)
            w[layer + names["x_proj"]] = normal(rank + 2 * states, inner)
            w[layer + names["step"] + ".weight"] = normal(inner, rank)
            w[layer + names["step"] + ".bias"] = normal(inner) - 3
        w[layer + "mixer.out_proj.weight"] = normal(embed_dim, inner)
        w[layer + "norm.weight"] = 1 + normal(embed_dim)
    w["norm_f.weight"] = 1 + normal(embed_dim)
    return w
