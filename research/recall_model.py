"""Models and sequences of the associative recall study (research/recall.py), following Zoology's harness.

B batch    T tokens    P key-value pairs    C model width    D inner width
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from research.causal_conv import silu_of_causal_conv
from vil.kernels import longhorn_scan, selective_scan
from vil.models.block import LonghornDirection, MambaDirection

VOCABULARY = 8192
POWER = 0.01  # the i-th possible position of a query has a probability proportional to i^(POWER - 1)
LAYERS = 2
DROPOUT = 0.1  # dropout rate of embeddings and attention


class Longhorn(nn.Module):
    """Causal mixer with the weights and operators of one direction of a ViL block."""

    direction = LonghornDirection

    def __init__(self, width: int, expand: int = 2, state_size: int = 16, conv_width: int = 4):
        super().__init__()
        inner, rank = expand * width, math.ceil(width / 16)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.weights = self.direction(inner, state_size, rank, conv_width, reverse=False)
        self.out_proj = nn.Linear(inner, width, bias=False)
        with torch.no_grad():
            self.out_proj.weight.div_(math.sqrt(LAYERS))

    def forward(self, h_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        of_u, of_z = self.in_proj.weight.chunk(2)
        u_BTD, z_BPD = F.linear(h_BTC, of_u), F.linear(tokens_at(h_BTC, wanted_BP), of_z)
        conv = self.weights.conv1d
        v_BTD = silu_of_causal_conv(u_BTD, conv.weight.squeeze(1), conv.bias)
        # Pad the rank to a multiple of 8 with zeros, so that all rows are aligned for the widest loads.
        rank, *states = self.weights.split
        zeros = -rank % 8
        projected = F.linear(v_BTD, F.pad(self.weights.x_proj.weight, (0, 0, zeros, 0)))
        step_BTR, k_BTN, q_BTN = projected.split((rank + zeros, *states), dim=-1)
        step_logits_BTD = F.linear(step_BTR, F.pad(self.weights.step_proj.weight, (zeros, 0)))
        y_BPD = tokens_at(self.scan(v_BTD, step_logits_BTD, k_BTN, q_BTN), wanted_BP)
        return self.out_proj(y_BPD * F.silu(z_BPD))

    def scan(self, v_BTD: Tensor, step_logits_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor) -> Tensor:
        return longhorn_scan(v_BTD, step_logits_BTD, k_BTN, q_BTN, self.weights.skip, self.weights.step_proj.bias)


class Mamba(Longhorn):
    direction = MambaDirection

    def scan(self, v_BTD: Tensor, step_logits_BTD: Tensor, k_BTN: Tensor, q_BTN: Tensor) -> Tensor:
        A_DN = -self.weights.A_log.exp()
        bias = self.weights.step_proj.bias
        return selective_scan(v_BTD, step_logits_BTD, A_DN, k_BTN, q_BTN, self.weights.skip, bias)


def tokens_at(t_BTC: Tensor, places_BP: Tensor | None) -> Tensor:
    """Return the tokens (B, P, C) at the positions `places_BP`, or all tokens if `places_BP` is None."""
    if places_BP is None:
        return t_BTC
    return t_BTC.gather(1, places_BP.unsqueeze(-1).expand(-1, -1, t_BTC.shape[-1]))


class Attention(nn.Module):
    """Causal single-head attention."""

    def __init__(self, width: int):
        super().__init__()
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        for layer, std in ((self.in_proj, 0.02), (self.out_proj, 0.02 / math.sqrt(2 * LAYERS))):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)

    def forward(self, h_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        q_B1TC, k_B1TC, v_B1TC = (part.unsqueeze(1) for part in self.in_proj(h_BTC).chunk(3, dim=-1))
        dropout = DROPOUT if self.training else 0.0
        y_B1TC = F.scaled_dot_product_attention(q_B1TC, k_B1TC, v_B1TC, dropout_p=dropout, is_causal=True)
        return self.out_proj(tokens_at(y_B1TC.squeeze(1), wanted_BP))


class RecurrentBlock(nn.Module):
    """Mamba's block, x + mixer(norm(x)), with an fp32 residual stream.

    The output has all tokens, or only the tokens at the positions `wanted_BP`.
    """

    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.mixer = mixer

    def forward(self, x_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        return tokens_at(x_BTC, wanted_BP) + self.mixer(self.norm(x_BTC), wanted_BP)


class AttentionBlock(nn.Module):
    """Zoology's transformer block without an MLP: the second residual branch is only a LayerNorm."""

    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixer = mixer

    def forward(self, x_BTC: Tensor, wanted_BP: Tensor | None = None) -> Tensor:
        x_BPC = tokens_at(x_BTC, wanted_BP) + self.mixer(self.norm(x_BTC), wanted_BP)
        return x_BPC + self.second_norm(x_BPC)


MIXERS: dict[str, type[nn.Module]] = {"longhorn": Longhorn, "mamba": Mamba, "attention": Attention}


class RecallModel(nn.Module):
    """Two-layer language model that predicts the value of each repeated key in a sequence."""

    def __init__(self, mixer: str, width: int, length: int, vocabulary: int = VOCABULARY):
        super().__init__()
        self.length, attends = length, mixer == "attention"
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width)) if attends else None
        block = AttentionBlock if attends else RecurrentBlock
        self.blocks = nn.ModuleList([block(MIXERS[mixer](width), width) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(width)

    def embedded(self, pairs_BS: Tensor, queries_BP: Tensor) -> Tensor:
        """Return the embeddings of the tokens (B, T, C).

        Most tokens are token 0, whose embedding is expanded instead of looked up. Therefore the gradient of this
        embedding is a sum instead of a long queue of atomic additions.
        """
        x_BSC = self.embedding(pairs_BS)
        keys_BPC = x_BSC[:, ::2]
        rest = self.embedding.weight[0].expand(len(x_BSC), self.length - x_BSC.shape[1], -1)
        places = (queries_BP - x_BSC.shape[1]).unsqueeze(-1).expand_as(keys_BPC)
        return torch.cat([x_BSC, rest.scatter(1, places, keys_BPC)], dim=1)

    def forward(self, pairs_BS: Tensor, queries_BP: Tensor) -> Tensor:
        """Return the logits (B, P, vocabulary) of the token that follows each of the P repeated keys."""
        queries_BP = queries_BP.long()
        x_BTC = self.embedded(pairs_BS, queries_BP)
        if self.positions is not None:
            x_BTC = F.dropout(x_BTC + self.positions, DROPOUT, self.training)
        *blocks, last = self.blocks
        for block in blocks:
            x_BTC = block(x_BTC)
        return F.linear(self.norm(last(x_BTC, queries_BP)), self.embedding.weight)

    def loss(self, pairs_BS: Tensor, queries_BP: Tensor) -> Tensor:
        """Return the mean cross-entropy, in fp32, between the predicted and the correct values of all queries."""
        logits_BPV = self(pairs_BS, queries_BP).float()
        return F.cross_entropy(logits_BPV.flatten(0, 1), pairs_BS[:, 1::2].flatten().long())


def recall_examples(
    count: int, length: int, pairs: int, seed: int, device: torch.device, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Sample key-value pairs k1 v1 ... kP vP (count, 2P) and the positions of the repeated keys (count, P), as int32.

    A sequence of T = `length` tokens has the pairs first, then every key once at even distances after the pairs; all
    other tokens are token 0. Keys are distinct tokens of the first half of the vocabulary, values of the second half.

    Raises:
        ValueError: The length is odd, or the pairs and their queries do not fit into the sequence.
    """
    if 4 * pairs > length or length % 2:
        raise ValueError(
            f"length must be even and at least {4 * pairs} for {pairs} pairs and their queries, got {length}"
        )
    generator = torch.Generator(device).manual_seed(seed)
    half, slots = vocabulary // 2, length // 2 - pairs
    weights = torch.arange(1, slots + 1, device=device).pow(POWER - 1)
    listed, queries = [], []
    for start in range(0, count, 8192):
        n = min(8192, count - start)
        keys = 1 + distinct(torch.ones(half - 1, device=device), n, pairs, generator)
        values = half + distinct(torch.ones(half, device=device), n, pairs, generator)
        listed.append(torch.stack([keys, values], dim=-1).flatten(1).int())
        queries.append((2 * pairs + 2 * distinct(weights, n, pairs, generator)).int())
    return torch.cat(listed), torch.cat(queries)


def distinct(weights: Tensor, count: int, pairs: int, generator: torch.Generator) -> Tensor:
    """Sample rows of distinct indices (count, pairs) with the given weights by the Gumbel-top-k trick."""
    uniform = torch.rand(count, len(weights), generator=generator, device=weights.device)
    return (weights.log() - uniform.clamp(min=1e-30).log().neg().log()).topk(pairs).indices
