"""Independent training and evaluation, written from the formulas of AdamW, cosine schedule, clipping, EMA and losses.

This module does not use `vil.training` or train_imagenet.py. It shares with the package only
the models, and the rule that derives seeds from the position in the run. Images are not cropped.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import timm
import torch
from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read_split(folder, size):
    """Return normalized images (N, 3, H, W) and targets (N,), sorted by class name and file name."""
    paths = sorted(folder.glob("*/*.png"))
    classes = sorted({path.parent.name for path in paths})
    resized = [Image.open(path).convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for path in paths]
    pixels = torch.stack([torch.tensor(np.array(image)) for image in resized])
    images = (pixels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return images.permute(0, 3, 1, 2).contiguous(), torch.tensor([classes.index(path.parent.name) for path in paths])


def seed_of(*place):
    return int(np.random.SeedSequence(place).generate_state(1)[0])


def rate_of(epoch, o):
    """Return an epoch's learning rate: linear warm-up, then a cosine that would reach min_lr after the last epoch."""
    if epoch < o.warmup_epochs:
        return o.warmup_lr + (o.lr - o.warmup_lr) * epoch / o.warmup_epochs
    return o.min_lr + (o.lr - o.min_lr) * (1 + math.cos(math.pi * epoch / o.epochs)) / 2


def layer_of(name):
    """Return a parameter's layer-decay index in a model of two blocks: stem 0, blocks 1 and 2, final norm 2, head 3."""
    stem = name in ("cls_token", "pos_embed") or name.startswith("patch_embed")
    return 0 if stem else {"blocks.0": 1, "blocks.1": 2, "norm.wei": 2}.get(name[:8], 3)


def is_decayed(name, parameter):
    return parameter.dim() > 1 and not name.endswith(".bias") and name not in ("cls_token", "pos_embed")


def mixed(images, targets, classes, place, o):
    """Return images and soft targets after mixup, which mixes each group of eight images with the reversed group."""
    one_hot = torch.eye(classes)[targets] * (1 - o.smoothing) + o.smoothing / classes
    if o.mixup == 0:
        return images, one_hot
    parts = []
    for start in range(0, len(images), 8):
        np.random.seed(seed_of(*place[:2], place[2] + start, 1))
        share = np.random.beta(o.mixup, o.mixup) if np.random.rand() < o.mixup_prob else 1.0
        x, y = images[start : start + 8], one_hot[start : start + 8]
        parts.append((share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)))
    return tuple(torch.cat(part) for part in zip(*parts))


def loss_of_labels(logits, shares, o):
    """Return the cross-entropy, or the binary cross-entropy per class, of soft targets."""
    if not o.bce_loss:
        return -(shares * logits.log_softmax(1)).sum(1).mean()
    targets = shares if o.bce_target_thresh is None else (shares > o.bce_target_thresh).float()
    p = logits.sigmoid()
    each = -(targets * p.log() + (1 - targets) * (1 - p).log())
    return each.sum(1).mean() if o.bce_sum else each.sum(1).mean() / logits.shape[1]


def distilled(logits, taught, o):
    """Return the distillation loss of Touvron et al. (2021).

    The target is the teacher's hard label (equation 3) or softened output (KL divergence, equation 2).
    """
    if o.distillation == "hard":
        return -logits.log_softmax(1)[torch.arange(len(logits)), taught.argmax(1)].mean()
    ours, theirs = (x / o.distillation_tau for x in (logits, taught))
    p = theirs.exp() / theirs.exp().sum(1, keepdim=True)
    return o.distillation_tau**2 * (p * (p.log() - ours.log_softmax(1))).sum(1).mean()


def answers(teacher, images):
    """Return a teacher's logits for the student's images, renormalized, and resized if the teacher's size is fixed."""
    cfg = teacher.pretrained_cfg
    pixels = images * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
    if cfg["fixed_input_size"]:
        size = cfg["input_size"][1:]
        pixels = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
    with torch.no_grad():
        return teacher((pixels - torch.tensor(cfg["mean"])[:, None, None]) / torch.tensor(cfg["std"])[:, None, None])


@torch.no_grad()
def adamw(model, gradients, moments, rate, t, o):
    """Apply step t of AdamW (the first step is 1) with decoupled weight decay and layer decay."""
    beta1, beta2 = o.opt_betas
    for name, p in model.named_parameters():
        lr = rate * (o.layer_decay or 1) ** (3 - layer_of(name))
        m, v, g = *moments[name], gradients[name]
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        if is_decayed(name, p):
            p.mul_(1 - lr * o.weight_decay)
        p.sub_(lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + o.opt_eps))


def evaluated(model, images, targets):
    """Return the mean cross-entropy, and top-1 and top-5 accuracy in percent."""
    with torch.no_grad():
        logits = model.eval()(images).double()
    # rank of the target class: number of classes with a larger logit
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    loss = (logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]).mean().item()
    return {
        "loss": loss,
        "top1": 100 * (ranks < 1).double().mean().item(),
        "top5": 100 * (ranks < 5).double().mean().item(),
    }


def grown(source, model):
    """Load the weights of `source` into `model`, which has another image size, with resampled position embeddings.

    The class token's embedding stays in the middle.
    """
    weights = source.state_dict()
    rows, middle = weights["pos_embed"][0], len(weights["pos_embed"][0]) // 2
    sides = [patched.patch_embed.grid_size for patched in (source, model)]
    grid = torch.cat([rows[:middle], rows[middle + 1 :]]).T.reshape(1, -1, *sides[0])
    grid = torch.nn.functional.interpolate(grid, sides[1], mode="bicubic", antialias=True, align_corners=False)
    resampled = grid[0].flatten(1).T
    middle = len(resampled) // 2
    weights["pos_embed"] = torch.cat([resampled[:middle], rows[None, len(rows) // 2], resampled[middle:]])[None]
    model.load_state_dict(weights)
    return model


def train(folder, options, micro_batch=None, changes=(0, {}), teacher=None, phases=({},)):
    """Train as train_imagenet.py does with the given options, in plain PyTorch.

    Args:
        changes: (step, options): options that replace others from this step on (steps start at 0), as after resuming.
        phases: Options of each phase. A phase starts from the weights and EMA weights of the previous phase only.

    Returns:
        A row per epoch as in summary.csv, the loss and gradient norm of each step, and the weights and EMA weights
        at the end of each epoch.
    """
    found = SimpleNamespace(rows=[], losses=[], norms=[], weights=[], averages=[])
    models = None
    for phase in phases:
        o = SimpleNamespace(**options | phase)
        torch.manual_seed(o.seed)
        classes, arguments = len([*(folder / "train").iterdir()]), dict(img_size=o.img_size, drop_path_rate=o.drop_path)
        made = [timm.create_model(o.model, num_classes=classes, **arguments, **o.model_kwargs)]
        made += [copy.deepcopy(made[0])]
        models = [grown(*pair) for pair in zip(models, made)] if models else made
        train_phase(folder, o, micro_batch, changes, teacher, *models, found)
    return found


def train_phase(folder, o, micro_batch, changes, teacher, model, average, found):
    (images, targets), validation = (read_split(folder / split, o.img_size) for split in ("train", "val"))
    classes, first = int(targets.max()) + 1, len(found.rows)
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    batch = o.global_batch_size
    micro_batch, steps = micro_batch or batch, len(images) // batch
    unique = math.ceil(batch / max(1, o.aug_repeats))  # number of distinct images per batch, with repeated augmentation
    for epoch in range(first, first + o.epochs):
        order = np.random.default_rng((o.seed, epoch)).permutation(len(images))
        for step in range(steps):
            if (t := (epoch - first) * steps + step) == changes[0]:
                vars(o).update(changes[1])
            rate = rate_of(epoch - first, o)
            chosen = torch.tensor([order[step * unique + place % unique] for place in range(batch)])
            losses = []
            for start in range(0, batch, micro_batch):
                place, part = (o.seed, epoch, step * batch + start), chosen[start : start + micro_batch]
                x, y = mixed(images[part], targets[part], classes, place, o)
                torch.manual_seed(seed_of(*place, 2))  # this seed determines stochastic depth
                logits = model.train()(x)
                losses.append(loss_of_labels(logits, y, o))
                if teacher:
                    share, taught = o.distillation_alpha, answers(teacher, x)
                    losses[-1] = (1 - share) * losses[-1] + share * distilled(logits, taught, o)
            loss = sum(losses) / len(losses)
            gradients = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters()))))
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            scale = min(1, o.clip_grad / norm) if o.clip_grad else 1
            adamw(model, {name: g * scale for name, g in gradients.items()}, moments, rate, t + 1, o)
            with torch.no_grad():
                for p, a in zip(model.parameters(), average.parameters()):
                    a.copy_(o.model_ema_decay * a + (1 - o.model_ema_decay) * p)
            found.losses.append(loss.item())
            found.norms.append(norm)
        means = [sum(values[-steps:]) / steps for values in (found.losses, found.norms)]
        row = {"epoch": epoch + 1, "lr": rate_of(epoch - first, o), "train_loss": means[0], "grad_norm": means[1]}
        for suffix, evaluated_model in (("", model), ("_ema", average)):
            row |= {f"eval_{k}{suffix}": v for k, v in evaluated(evaluated_model, *validation).items()}
        found.rows.append(row)
        found.weights.append(copy.deepcopy(model.state_dict()))
        found.averages.append(copy.deepcopy(average.state_dict()))
