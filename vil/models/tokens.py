"""Operations on the tokens of an image: patches in row-major order, with the class token in the middle.

Dimension letters in the suffixes of tensor names:

    B batch    C channels    h, w patch grid    n = h w patches    L = n + 1 tokens
    r rows of patches    S = r + 1 row means and class token
"""

import math
import operator
from collections.abc import Sequence

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor


def middle_token(x_BLC: Tensor) -> Tensor:
    """Return the class token (B, 1, C), which is the middle token."""
    middle = (x_BLC.shape[1] - 1) // 2
    return x_BLC[:, middle : middle + 1]


def insert_class_token(patches_BnC: Tensor, token_B1C: Tensor) -> Tensor:
    """Insert the class token (B, 1, C) in the middle of the patches (B, n, C). Return tokens (B, L, C)."""
    middle = patches_BnC.shape[1] // 2
    before, behind = patches_BnC.split([middle, patches_BnC.shape[1] - middle], dim=1)
    return torch.cat((before, token_B1C, behind), dim=1)


def split_class_token(x_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """Split tokens (B, L, C) into patches (B, n, C) and class token (B, 1, C). Inverse of `insert_class_token`."""
    middle = (x_BLC.shape[1] - 1) // 2
    return torch.cat((x_BLC[:, :middle], x_BLC[:, middle + 1 :]), dim=1), middle_token(x_BLC)


def transpose_grid(x_BLC: Tensor, h: int, w: int) -> Tensor:
    """Reorder the patches of an (h, w) grid from row-major to column-major order."""
    patches_BnC, token_B1C = split_class_token(x_BLC)
    return insert_class_token(patches_BnC.unflatten(1, (h, w)).transpose(1, 2).flatten(1, 2), token_B1C)


def row_means(x_BLC: Tensor, rows: int) -> Tensor:
    """Average each row of patches and insert the class token in the middle. Return a tensor (B, S, C)."""
    patches_BnC, token_B1C = split_class_token(x_BLC)
    return insert_class_token(patches_BnC.unflatten(1, (rows, -1)).mean(2), token_B1C)


def repeat_rows(x_BSC: Tensor, length: int) -> Tensor:
    """Repeat each row's token for all patches of the row, and keep the class token: (B, S, C) to (B, L, C)."""
    rows_BrC, token_B1C = split_class_token(x_BSC)
    return insert_class_token(rows_BrC.unsqueeze(2).expand(-1, -1, length, -1).flatten(1, 2), token_B1C)


def grid_of(L: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """Return the patch grid (h, w) of L tokens, which is `grid` or, if `grid` is None, a square grid.

    Raises:
        ValueError: L is not h w + 1 (the patches and the class token).
    """
    h, w = (math.isqrt(L - 1),) * 2 if grid is None else grid
    if h * w + 1 != L:
        need = f"{h * w + 1} for the grid {(h, w)}" if grid else "a square number plus 1 if no grid is given"
        raise ValueError(
            f"number of tokens of a pooled block must be {need}, got {L}: pass the patch grid as grid=(h, w)"
        )
    return h, w


def resample_pos_embed(pos_embed_1LC: Tensor, new_size: Sequence[int], old_size: Sequence[int]) -> Tensor:
    """Resample position embeddings from one patch grid to another; the class token's embedding is unchanged."""
    if tuple(new_size) == tuple(old_size):
        return pos_embed_1LC
    patches_1nC, token_11C = split_class_token(pos_embed_1LC)
    if patches_1nC.requires_grad and torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        # Compile one graph per grid size, because PyTorch cannot compile the gradient of resampling for symbolic sizes
        # (pytorch#197622).
        new_size = [operator.index(n) for n in new_size]
    patches_1nC = resample_abs_pos_embed(patches_1nC, list(new_size), list(old_size), num_prefix_tokens=0)
    return insert_class_token(patches_1nC, token_11C)
