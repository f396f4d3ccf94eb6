"""Training and evaluation once more, from the formulas: AdamW, cosine, clipping, EMA and the losses, one line each.

Independent of `vil.training` and of train_imagenet.py: only the model is shared, and the rule by which seeds follow
from a place in the run. Images are of the model's size already, so that crops and resizing leave them as they are.
"""

import copy
import math
from types import SimpleNamespace

import numpy as np
import timm
import torch
from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read_split(folder):
    """Normalised images (N, 3, H, W) and targets (N,): classes, and images within a class, in the order of names."""
    paths = sorted(folder.glob("*/*.png"))
    classes = sorted({path.parent.name for path in paths})
    pixels = torch.stack([torch.tensor(np.array(Image.open(path).convert("RGB"))) for path in paths])
    images = (pixels / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return images.permute(0, 3, 1, 2).contiguous(), torch.tensor([classes.index(path.parent.name) for path in paths])


def seed_of(*place):
    return int(np.random.SeedSequence(place).generate_state(1)[0])


def rate_of(epoch, o):
    """Linear warm-up from the rate of the first epoch, then the cosine that ends at min_lr after the last."""
    if epoch < o.warmup_epochs:
        return o.warmup_lr + (o.lr - o.warmup_lr) * epoch / o.warmup_epochs
    return o.min_lr + (o.lr - o.min_lr) * (1 + math.cos(math.pi * epoch / o.epochs)) / 2


def layer_of(name):
    """Of a model with two blocks: the stem, each block, the last one with the norm behind it, and the head."""
    stem = name in ("cls_token", "pos_embed") or name.startswith("patch_embed")
    return 0 if stem else {"blocks.0": 1, "blocks.1": 2, "norm.wei": 2}.get(name[:8], 3)


def is_decayed(name, parameter):
    return parameter.dim() > 1 and not name.endswith(".bias") and name not in ("cls_token", "pos_embed")


def mixed(images, targets, classes, place, o):
    """Mixup of each eight images with their mirror image in the list; smoothed one-hot targets, mixed likewise."""
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


@torch.no_grad()
def adamw(model, gradients, moments, rate, t, o):
    """The step numbered t, from 1, with decoupled weight decay."""
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
    """Mean cross-entropy, top-1 and top-5 in percent."""
    with torch.no_grad():
        logits = model.eval()(images).double()
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)  # classes above the right one
    loss = (logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]).mean().item()
    return {
        "loss": loss,
        "top1": 100 * (ranks < 1).double().mean().item(),
        "top5": 100 * (ranks < 5).double().mean().item(),
    }


def train(folder, options, micro_batch=None, changes=(0, {})):
    """A run of train_imagenet.py with these options on the splits of `folder`.

    `changes`: from this step on, counted from 0, other options hold, as of a run that is resumed with them.

    Returns:
        A row for each epoch as in summary.csv, the loss and the gradient's norm of every step, and for every epoch the
        weights and their average at its end.
    """
    o = SimpleNamespace(**options)
    (images, targets), validation = read_split(folder / "train"), read_split(folder / "val")
    classes = int(targets.max()) + 1
    torch.manual_seed(o.seed)
    model = timm.create_model(
        o.model, num_classes=classes, img_size=o.img_size, drop_path_rate=o.drop_path, **o.model_kwargs
    )
    average = copy.deepcopy(model)
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    batch = o.global_batch_size
    micro_batch, steps = micro_batch or batch, len(images) // batch
    unique = math.ceil(batch / max(1, o.aug_repeats))  # images of a batch, each of which is in it so many times
    found = SimpleNamespace(rows=[], losses=[], norms=[], weights=[], averages=[])
    for epoch in range(o.epochs):
        order = np.random.default_rng((o.seed, epoch)).permutation(len(images))
        for step in range(steps):
            if (t := epoch * steps + step) == changes[0]:
                vars(o).update(changes[1])
            chosen = torch.tensor([order[step * unique + place % unique] for place in range(batch)])
            losses = []
            for start in range(0, batch, micro_batch):
                place, part = (o.seed, epoch, step * batch + start), chosen[start : start + micro_batch]
                x, y = mixed(images[part], targets[part], classes, place, o)
                torch.manual_seed(seed_of(*place, 2))  # of stochastic depth
                losses.append(-(y * model.train()(x).log_softmax(1)).sum(1).mean())
            loss = sum(losses) / len(losses)
            gradients = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters()))))
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            scale = min(1, o.clip_grad / norm) if o.clip_grad else 1
            adamw(model, {name: g * scale for name, g in gradients.items()}, moments, rate_of(epoch, o), t + 1, o)
            with torch.no_grad():
                for p, a in zip(model.parameters(), average.parameters()):
                    a.copy_(o.model_ema_decay * a + (1 - o.model_ema_decay) * p)
            found.losses.append(loss.item())
            found.norms.append(norm)
        means = [sum(values[-steps:]) / steps for values in (found.losses, found.norms)]
        row = {"epoch": epoch + 1, "lr": rate_of(epoch, o), "train_loss": means[0], "grad_norm": means[1]}
        for suffix, evaluated_model in (("", model), ("_ema", average)):
            row |= {f"eval_{k}{suffix}": v for k, v in evaluated(evaluated_model, *validation).items()}
        found.rows.append(row)
        found.weights.append(copy.deepcopy(model.state_dict()))
        found.averages.append(copy.deepcopy(average.state_dict()))
    return found
