"""Tests of models against an independent implementation, and of the interface of timm's models."""

import copy
import functools
import math
import re

import naive_model
import pytest
import timm
import torch
import torch.nn.functional as F
from models import KINDS, assert_same_output_and_gradients, gradients, random_images, small, stochastic_depth
from models import with_random_parameters as randomised
from timm.models import _registry
from torch.autograd import forward_ad
from torchvision.models import feature_extraction

import vil
from vil.kernels.block.reference import block as naive_block
from vil.kernels.scan import reference
from vil.models import dispatch, vision_longhorn
from vil.models.block import Block, LonghornMixer, MambaMixer
from vil.models.tokens import middle_token, split_class_token

COUNTS = dict(vil_tiny=6_853_096, vil_small=25_206_760, vil_base=96_418_792)
COUNTS |= dict(vim_tiny=7_148_008, vim_small=25_796_584, vim_base=97_598_440)


@pytest.mark.parametrize(("name", "parameters"), COUNTS.items())
def test_parameter_counts(name, parameters):
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    if name == "vil_tiny":  # vil_tiny uses VisionLonghorn's default arguments
        assert repr(vil.VisionLonghorn(device="meta")) == repr(model)
        assert "DropPath" not in repr(model)
        assert vil.VisionLonghorn(device="meta").patch_embed.img_size == (224, 224)


@pytest.mark.parametrize("mixer", [LonghornMixer, MambaMixer])
@pytest.mark.parametrize(("dim", "tokens"), [(20, 1), (16, 2), (33, 7), (24, 40)])
def test_a_block_equals_the_independent_implementation(mixer, dim, tokens):
    block = randomised(Block(dim, mixer))
    x = random_images(2, tokens, dim, dtype=torch.float64)
    expected = naive_model.block(x, dict(block.named_parameters()), naive_model.OURS)
    assert_same_output_and_gradients(block, block(x), expected)


@KINDS
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(), dict(img_size=(64, 48)), dict(img_size=(16, 80)), dict(stride=8), dict(global_pool="avg"),
        dict(patch_size=(8, 16), stride=(8, 4), img_size=(24, 32), in_chans=1, depth=1),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_equals_the_independent_implementation(name, kwargs):
    model = randomised(small(name, **kwargs))
    x = random_images(2, model.in_chans, *model.patch_embed.img_size, dtype=torch.float64)
    weights = dict(model.named_parameters())
    stride, pool = kwargs.get("stride", 16), kwargs.get("global_pool", "token")
    assert_same_output_and_gradients(model, model(x), naive_model.model(x, weights, stride=stride, pool=pool))


@KINDS
def test_stochastic_depth_equals_the_independent_model_with_dropped_updates(name):
    model = randomised(small(name, depth=4, img_size=32, drop_path_rate=0.75)).train()
    x, weights = random_images(6, 3, 32, 32, dtype=torch.float64), dict(model.named_parameters())
    scales = stochastic_depth([0, 0.25, 0.5, 0.75], len(x), seed=5)
    torch.manual_seed(5)
    assert_same_output_and_gradients(model, model(x), naive_model.model(x, weights, scales=scales))
    torch.testing.assert_close(model.eval()(x), naive_model.model(x, weights), rtol=0, atol=1e-11)


@pytest.mark.parametrize("fused", [False, True])
def test_drop_paths_in_eval_mode_drop_nothing_in_a_training_model(fused, request):
    model, x = small(depth=4, drop_path_rate=0.75).train(), random_images(6, 3, 48, 48)
    for part in model.modules():
        if isinstance(part, timm.layers.DropPath):
            part.eval()
    dispatch.set_fused(fused)
    request.addfinalizer(lambda: dispatch.set_fused(True))
    found = model(x)
    torch.testing.assert_close(found, model.eval()(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "head",
    [
        torch.nn.Linear(32, 3), torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 3)),
        torch.nn.Linear(32, 7, bias=False), None,
    ],
    ids=str,
)  # fmt: skip
def test_a_model_with_another_head_or_quantized_weights_loads_its_own_state_dict(head):
    model = small()
    if head:
        model.head = head
    else:
        model = torch.ao.quantization.quantize_dynamic(model.eval(), {torch.nn.Linear})
    assert str(model.load_state_dict(copy.deepcopy(model.state_dict()))) == "<All keys matched successfully>"


def test_a_longhorn_layer_equals_the_bidirectional_mixer_or_one_causal_direction():
    x = random_images(2, 9, 16, dtype=torch.float64)
    sizes = dict(expand=3, state_size=8, conv_width=2)
    both, mixer = randomised(vil.Longhorn(16, bidirectional=True, **sizes)), LonghornMixer(16, **sizes).double()
    mixer.load_state_dict(both.state_dict())
    torch.testing.assert_close(both(x), mixer(x), rtol=1e-9, atol=1e-12)
    causal = randomised(vil.Longhorn(16))
    u, z = causal.in_proj(x).chunk(2, dim=-1)
    y = naive_model.direction(u, dict(causal.named_parameters(prefix="mixer")), naive_model.OURS["directions"][0])
    torch.testing.assert_close(causal(x), causal.out_proj(y * F.silu(z)), rtol=1e-9, atol=1e-12)
    # The causal layer has the same modules as one direction of a mixer.
    assert repr(causal.directions) == repr(LonghornMixer(16).directions[:1])
    assert all(p.is_meta for p in vil.Longhorn(16, device="meta").parameters())


def test_pooling():
    x = random_images(2, 3, 48, 48)
    token = small().eval()
    tokens = token.forward_features(x)
    assert tokens.shape == (2, 10, 32)
    torch.testing.assert_close(token(x), token.head(tokens[:, 4]))
    torch.testing.assert_close(token.forward_head(tokens, pre_logits=True), tokens[:, 4])
    token.reset_classifier(0, "")
    torch.testing.assert_close(token(x), tokens)
    assert small(global_pool="", num_classes=0)(x).shape == tokens.shape
    for build in (small, lambda global_pool: small().reset_classifier(5, global_pool)):
        with pytest.raises(ValueError, match="global_pool must be 'token', 'avg' or '', got 'max'"):
            build(global_pool="max")


@pytest.fixture
def fused(monkeypatch):
    """Simulate the fused operator. The returned list records which blocks computed only the middle token."""
    middles = []

    def operator(x, weights, options, scales, normed=None):
        for own in zip(weights, options, scales, strict=True):
            x = naive_block(x, *own)
        middles.extend(own.class_token_only for own in options)
        return middle_token(x) if options[-1].class_token_only else x, None

    monkeypatch.setattr(dispatch, "_fused", True)
    monkeypatch.setattr(dispatch, "fused_operator", lambda x, weights: operator)
    return middles


@pytest.mark.parametrize("size", [(48, 48), (48, 64), (16, 16)])
@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pooled"])
def test_the_last_block_computes_only_the_class_token(name, size, fused):
    model = randomised(small(name, depth=3, img_size=size, drop_path_rate=0.5))
    x = random_images(4, 3, *size, dtype=torch.float64)
    for checkpointing in (False, True):
        torch.manual_seed(1)
        expected = model.forward_head(model.forward_features(x))
        fused.clear()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        actual = model(x)
        assert fused == [False, False, True]
        assert_same_output_and_gradients(model, actual, expected)


@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pooled"])
def test_the_last_block_computes_all_tokens_if_hooks_or_wrappers_need_them(name, fused):
    model = small(name, depth=2).eval()
    x = random_images(2, 3, 48, 48)
    expected = model(x)
    assert fused == [False, True]
    fused.clear()
    shapes = []
    for watched in (model.blocks, model.blocks[-1]):
        handle = watched.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
        torch.testing.assert_close(model(x), expected)
        handle.remove()
    assert shapes == [(2, 10, 32)] * 2
    model.forward_features(x)
    model.forward_intermediates(x)
    small(name, global_pool="avg", depth=2)(x)
    model.blocks[-1] = torch.nn.Sequential(model.blocks[-1])
    torch.testing.assert_close(model(x), expected)
    assert fused == [False] * 12

    class Twice(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    model.blocks = Twice(*model.blocks)
    assert not torch.allclose(model(x), expected)
    assert fused == [False] * 16
    model.blocks = model.blocks[:0]
    assert model(x).shape == expected.shape


def test_dropout_before_the_head_is_active_only_in_train_mode():
    model = small(drop_rate=0.25)
    tokens = torch.rand(400, 10, 32) + 1
    pooled = model.train().forward_head(tokens, pre_logits=True)
    assert (pooled == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(pooled, torch.where(pooled == 0, 0, tokens[:, 4] / 0.75))
    assert torch.equal(model.eval().forward_head(tokens, pre_logits=True), tokens[:, 4])


def test_reset_classifier():
    model = small(global_pool="avg").eval()
    x = random_images(2, 3, 48, 48)
    pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    model.reset_classifier(5)
    assert model.num_classes == model.get_classifier().out_features == model(x).shape[1] == 5
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    for training in (False, True):
        model.train(training).to(torch.bfloat16).reset_classifier(3, "token")
        assert (model.global_pool, model.head.weight.dtype) == ("token", torch.bfloat16)
        assert model.head.training == training


@pytest.mark.parametrize("size", [(48, 48), (50, 33), (7, 100), (96, 16), (128, 80)])
@pytest.mark.parametrize(
    ("stride", "patch"), [((16, 16), (16, 16)), ((8, 8), (16, 16)), ((8, 16), (16, 16)), ((8, 4), (16, 8))]
)
def test_dynamic_img_size_equals_a_model_built_for_the_padded_image(size, stride, patch):
    model = randomised(small(dynamic_img_size=True, stride=stride, patch_size=patch)).float().eval()
    x = random_images(2, 3, *size)
    padded = [max(p, p + math.ceil((n - p) / step) * step) for n, p, step in zip(size, patch, stride)]
    fixed = small(stride=stride, patch_size=patch).eval()
    fixed.load_state_dict(model.state_dict())
    fixed.set_input_size(padded)
    expected = fixed(F.pad(x, (0, padded[1] - size[1], 0, padded[0] - size[0])))
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    "change", [dict(img_size=80), dict(img_size=(32, 64)), dict(patch_size=8), dict(img_size=36, patch_size=(12, 6))]
)
def test_set_input_size_equals_loading_into_a_model_created_at_that_size(change):
    model = small().eval()
    created = small(**change).eval()
    created.load_state_dict(model.state_dict())
    model.set_input_size(**change)
    assert all(p.requires_grad for p in model.parameters())
    x = random_images(2, 3, *created.patch_embed.img_size)
    torch.testing.assert_close(model(x), created(x))
    assert [i["reduction"] for i in model.feature_info] == [i["reduction"] for i in created.feature_info]


@pytest.mark.skipif(not hasattr(timm.data, "resolve_input_data_config"), reason="timm 1.0.29 does not ask the model")
def test_the_data_config_has_the_models_image_size():
    model = small(img_size=(48, 80))
    assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 48, 80)
    model.set_input_size(64)
    assert timm.data.resolve_input_data_config(model)["input_size"] == (3, 64, 64)
    with pytest.raises(ValueError, match="the model requires"):
        timm.data.resolve_input_data_config(model, dict(img_size=80))
    assert timm.data.resolve_input_data_config(small(dynamic_img_size=True), dict(img_size=80))["input_size"][1] == 80


def resampled(pos_embed, old, new):
    """Return position embeddings resampled to another patch grid by antialiased bicubic interpolation, as timm does."""
    patches, class_row = naive_model.patches_and_class_token(pos_embed)
    image = patches.unflatten(1, old).permute(0, 3, 1, 2)
    patches = F.interpolate(image, new, mode="bicubic", antialias=True).flatten(2).transpose(1, 2)
    middle = patches.shape[1] // 2
    return torch.cat([patches[:, :middle], class_row[:, None], patches[:, middle:]], dim=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_position_embeddings_are_resampled_between_rectangular_grids(dynamic):
    model = randomised(small(img_size=(32, 80), dynamic_img_size=dynamic)).float().eval()
    weights = {name: t.detach().clone() for name, t in model.named_parameters()}
    weights["pos_embed"] = resampled(weights["pos_embed"], (2, 5), (4, 3))
    x = random_images(2, 3, 64, 48)
    if not dynamic:
        model.set_input_size((64, 48))
        torch.testing.assert_close(model.pos_embed.detach(), weights["pos_embed"])
    torch.testing.assert_close(model(x), naive_model.model(x, weights), rtol=1e-4, atol=1e-5)


def test_an_invalid_or_unchanged_image_size_leaves_the_model_unchanged():
    model = small(in_chans=2).eval().requires_grad_(False)
    x, before = random_images(1, 2, 48, 48), list(model.parameters())
    expected = model(x)
    with pytest.raises(ValueError, match="must cover the image"):
        model.set_input_size(img_size=50, patch_size=8)
    model.set_input_size(img_size=48, patch_size=16)
    assert all(p is q for p, q in zip(model.parameters(), before))
    torch.testing.assert_close(model(x), expected)
    model.double().set_input_size(img_size=64, patch_size=8)
    # Resizing position embeddings keeps their dtype and requires_grad.
    assert {(p.requires_grad, p.dtype) for p in model.parameters()} == {(False, torch.float64)}
    assert model.patch_embed.proj.in_channels == 2


SIZE_ERRORS = {
    r"must cover the image, got img_size=\(50, 48\): set img_size=\(48, 48\)": dict(img_size=(50, 48)),
    r"got img_size=\(8, 8\).*img_size=\(16, 16\) \(--img-size 16\), or .* dynamic_img_size=True": dict(img_size=8),
    r"^img_size must be at least 1, got \(0, 0\)$": dict(img_size=0),
    r"image size must be \(48, 48\), got \(64, 48\).*img_size=\(64, 48\) .*kwargs img_size='\(64, 48\)'\)": dict(),
    r"resolve_model_data_config\(model, dict\(input_size=\(3, 48, 48\)\)\)": dict(),
}


@pytest.mark.parametrize("error", SIZE_ERRORS)
def test_errors_for_invalid_image_sizes_suggest_valid_sizes(error):
    with pytest.raises(ValueError, match=error):
        small(**SIZE_ERRORS[error])(random_images(1, 3, 64, 48))


@pytest.mark.parametrize("shape", [(1, 1, 48, 48), (3, 48, 48)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_without_batch_dimension_or_with_one_channel_are_rejected(shape, dynamic):
    with pytest.raises(ValueError, match=re.escape(f"(B, 3, H, W), got {list(shape)}")):
        small(dynamic_img_size=dynamic)(random_images(*shape))


@KINDS
@pytest.mark.parametrize("stride", [16, 8])
@pytest.mark.parametrize("norm", [False, True])
def test_intermediates_equal_the_independent_models_feature_maps(name, stride, norm):
    model = randomised(small(name, depth=3, img_size=(48, 80), stride=stride)).eval()
    x, weights = random_images(2, 3, 48, 80, dtype=torch.float64), dict(model.named_parameters())
    stream = naive_model.residual_stream(x, weights, stride=stride)
    normed = [naive_model.rms_norm(tokens, weights["norm.weight"]) for tokens in stream]
    final, maps = model.forward_intermediates(x, norm=norm)
    close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)
    close(final, normed[-1])
    close(model.forward_features(x), normed[-1])
    assert len(maps) == 3
    h, w = (3, 5) if stride == 16 else (5, 9)
    for tokens, found in zip((normed if norm else stream)[1:], maps):
        patches, _ = naive_model.patches_and_class_token(tokens)
        assert found.is_contiguous()
        close(found, patches.transpose(1, 2).reshape(2, 32, h, w))


def test_options_of_forward_intermediates():
    model = randomised(small(depth=4)).float().eval()
    x = random_images(2, 3, 48, 48)
    stream = naive_model.residual_stream(x, dict(model.named_parameters()))
    patches, class_tokens = zip(*map(naive_model.patches_and_class_token, stream[1:]))
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)

    def intermediates(**options):
        return model.forward_intermediates(x, output_fmt="NLC", **options)

    for indices, chosen in ((None, [0, 1, 2, 3]), (2, [2, 3]), ([0, -1], [0, 3])):
        close(intermediates(indices=indices, intermediates_only=True), [patches[i] for i in chosen])
    for options, last in ((dict(stop_early=True), 2), ({}, 4)):
        close(intermediates(indices=[1], **options), (model.norm(stream[last]), [patches[1]]))
    found = intermediates(indices=[1], return_prefix_tokens=True, intermediates_only=True)
    close(found[0], (patches[1], class_tokens[1][:, None]))
    ((_, token),) = intermediates(indices=1, norm=True, return_prefix_tokens=True, intermediates_only=True)
    close(model.head(token[:, 0]), model(x))
    result = intermediates(output_dict=True)
    close(result, dict(image_intermediates=list(patches), image_features=model.norm(stream[4])))
    result = intermediates(output_dict=True, return_prefix_tokens=True, intermediates_only=True)
    assert set(result) == {"image_intermediates", "image_intermediates_prefix"}
    close(result["image_intermediates_prefix"], [token[:, None] for token in class_tokens])
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NLC', got 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


def test_features_only_of_any_size():
    backbone = small(features_only=True, dynamic_img_size=True, depth=4, out_indices=(1, 3)).eval()
    assert backbone.feature_info.channels() == [32, 32]
    assert backbone.feature_info.reduction() == [16, 16]
    full = small(dynamic_img_size=True, depth=4).eval()
    for size, grid in [((48, 48), (3, 3)), ((64, 100), (4, 7)), ((33, 16), (3, 1))]:
        x = random_images(1, 3, *size)
        maps = backbone(x)
        assert [tuple(m.shape) for m in maps] == [(1, 32, *grid)] * 2
        torch.testing.assert_close(maps, full.forward_intermediates(x, indices=[1, 3], intermediates_only=True))
    reductions = [info["reduction"] for stride in (8, (8, 16)) for info in small(stride=stride).feature_info]
    assert reductions == [8, 8, 16, 16]
    assert small(features_only=True, depth=5).feature_info.module_name() == ["blocks.2", "blocks.3", "blocks.4"]


def test_pruning_removes_blocks_that_the_intermediates_do_not_need():
    x = random_images(1, 3, 48, 48)
    model = small(depth=4).eval()
    weights = {name: t.detach().clone() for name, t in model.named_parameters()}
    expected = model.forward_intermediates(x, indices=[1], intermediates_only=True)
    tokens = naive_model.residual_stream(x, weights)[2]
    model.norm.weight.data += 1
    assert model.prune_intermediate_layers([1], prune_norm=True) == [1]
    assert len(model.blocks) == 2
    assert model.num_classes == 0
    torch.testing.assert_close(model.forward_intermediates(x, indices=[1], intermediates_only=True), expected)
    torch.testing.assert_close(model(x), tokens)  # the pruned model has no final norm and no head

    model = small(depth=4).eval()
    model.load_state_dict(weights)
    assert model.prune_intermediate_layers([0, 2], prune_head=False) == [0, 2]
    kept = {name: t for name, t in weights.items() if not name.startswith("blocks.3.")}
    torch.testing.assert_close(model(x), naive_model.model(x, kept))
    assert model.prune_intermediate_layers() == [2]  # the result is the index of the last kept block
    assert len(model.blocks) == 3

    model = small().bfloat16()
    model.prune_intermediate_layers([1], prune_norm=True, prune_head=False)
    assert model(x.bfloat16()).dtype == torch.bfloat16  # although the residual stream is fp32


@pytest.mark.parametrize("fuse", [False, True])
def test_gradient_checkpointing_recomputes_every_block_in_backward(fuse, request):
    if fuse:
        request.getfixturevalue("fused")
    model = small(depth=3)
    x, runs = random_images(2, 3, 48, 48), []
    for i, block in enumerate(model.blocks):
        (block if i == 1 else block.mixer).register_forward_pre_hook(lambda module, args, i=i: runs.append(i))
    for forward in (model, lambda x: model.forward_intermediates(x)[0]):
        for enable, again in ((True, [2, 1, 0]), (False, [])):
            model.set_grad_checkpointing(enable)
            forward(x).sum().backward()
            assert runs == [0, 1, 2] + again
            runs.clear()


@pytest.mark.parametrize("fuse", [False, True])
def test_gradient_checkpointing_does_not_change_gradients(fuse, monkeypatch):
    monkeypatch.setattr(dispatch, "_fused", fuse)
    model, x, results = small(drop_path_rate=0.5, depth=4).train(), random_images(4, 3, 48, 48), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        results.append(torch.autograd.grad(model(x).square().mean(), list(model.blocks.parameters())))
    torch.testing.assert_close(*results)


@KINDS
def test_autocast_is_close_to_fp32_and_keeps_the_residual_stream_in_fp32(name):
    model = small(name, depth=6)
    x = random_images(4, 3, 48, 48)
    expected = model(x)
    dtypes = set()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: dtypes.add((args[0].dtype, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(x)
    assert dtypes == {(torch.float32, torch.float32)}
    assert (actual - expected).norm() / expected.norm() < 0.02
    for found, truth in zip(gradients(actual.float(), model), gradients(expected, model)):
        assert (found - truth).norm() / truth.norm() < 0.1


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype(name, dtype):
    reference = small(name)
    x = random_images(2, 3, 48, 48)
    expected = reference(x)
    model = small(name, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.load_state_dict(reference.state_dict())
    residual = []
    model.blocks[0].register_forward_hook(lambda module, args, output: residual.append(output.dtype))
    logits, (tokens, maps) = model(x.to(dtype)), model.forward_intermediates(x.to(dtype))
    assert {logits.dtype, tokens.dtype, maps[0].dtype} == {dtype}
    assert set(residual) == {torch.promote_types(dtype, torch.float32)}
    tolerance = 0.02 if dtype == torch.bfloat16 else 3e-3 if dtype == torch.float16 else 1e-5
    assert (logits - expected).norm() / expected.norm() < tolerance


def test_low_precision_models_do_not_round_parameters_that_are_added_or_normalized():
    """bf16 models scan and add embeddings, patch bias and step bias in fp32, and norms round only their outputs."""
    model = randomised(small("vim_tiny", depth=1)).bfloat16()
    exact = {name: t.detach().double() for name, t in model.named_parameters()}
    close = functools.partial(torch.testing.assert_close, check_dtype=False, atol=1e-6)
    x = random_images(2, 3, 48, 48, dtype=torch.bfloat16)
    tokens = model.embed(x)
    patches = model.patch_embed(x, add_bias=False).double().flatten(1, 2)
    patches, class_token = patches + exact["patch_embed.proj.bias"], exact["cls_token"].expand(2, -1, -1)
    assert tokens.dtype == torch.float32
    close(tokens, torch.cat([patches[:, :4], class_token, patches[:, 4:]], 1) + exact["pos_embed"], rtol=1e-6)

    tokens = 100 * random_images(2, 5, 32)
    close(model.norm(tokens), naive_model.rms_norm(tokens.double(), exact["norm.weight"]), rtol=1.01 * 2**-8)

    mixer = model.blocks[0].mixer
    v, logits = random_images(2, 2, 2, 30, 64).unbind(0)
    b, c = random_images(2, 2, 2, 30, 16).unbind(0)
    for g, (y, w) in enumerate(zip(mixer.scan(v, logits, b, c), mixer.directions)):
        weights = (-w.A_log.double().exp(), b[g].double(), c[g].double(), w.skip.double(), w.step_proj.bias.double())
        expected = reference.selective(v[g].double(), logits[g].double(), *weights, reverse=bool(g))
        close(y, expected, rtol=1e-5, atol=1e-5)


def assert_initialised(model, name):
    """Assert that each parameter matches its initialization. Narrow models have too few values for the tolerances."""
    width, depth = model.embed_dim, len(model.blocks)

    def about(t, std, mean=0.0):
        t = t.detach().double()
        assert t.std().item() == pytest.approx(std, rel=4 / t.numel() ** 0.5)
        assert t.mean().item() == pytest.approx(mean, abs=5 * std / t.numel() ** 0.5)

    def uniform(t, bound):
        about(t, bound / 3**0.5)
        assert 0.95 * bound < t.abs().max() <= bound * (1 + 1e-6)

    about(model.pos_embed, 0.02)
    about(model.cls_token, 0.02)
    about(model.head.weight, 0.02)
    lecun = (3 * 16 * 16) ** -0.5  # standard deviation of LeCun's normal initialization: 1 / sqrt(fan-in)
    about(model.patch_embed.proj.weight, lecun)
    assert 2.2 * lecun < model.patch_embed.proj.weight.abs().max() < 2.28 * lecun
    assert model.pos_embed.abs().max() > 3 * 0.02
    assert not model.patch_embed.proj.bias.any()
    assert not model.head.bias.any()
    assert (model.norm.weight == 1).all()
    for block in model.blocks:
        assert (block.norm.weight == 1).all()
        uniform(block.mixer.in_proj.weight, width**-0.5)  # in_proj has PyTorch's default initialization
        uniform(block.mixer.out_proj.weight, (2 * width) ** -0.5 / depth**0.5)
        for direction in block.mixer.directions:
            uniform(direction.x_proj.weight, (2 * width) ** -0.5)
            uniform(direction.conv1d.weight, 4**-0.5)
            uniform(direction.conv1d.bias, 4**-0.5)
            uniform(direction.step_proj.weight, (width / 16) ** -0.5)
            assert (direction.skip == 1).all()
            if name == "vim_tiny":
                dt = F.softplus(direction.step_proj.bias.detach().double())
                assert 1e-3 * 0.999 < dt.min() < 1.2e-3
                assert 0.8e-1 < dt.max() < 1e-1 * 1.001
                about(dt.log(), math.log(100) / 12**0.5, mean=math.log(1e-2))  # step size dt is log-uniform
                expected = torch.arange(1.0, 17.0).expand(2 * width, -1)
                torch.testing.assert_close(direction.A_log.detach().exp(), expected)
            else:
                assert not direction.step_proj.bias.any()


@KINDS
@pytest.mark.parametrize("meta", [False, True])
def test_initialisation_also_after_the_meta_device(name, meta):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=4, device="meta" if meta else "cpu")
    if meta:
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(float("nan"))
        model.init_weights()
    assert_initialised(model, name)


def test_compiles_without_graph_breaks():
    model, x = small("vim_tiny", dynamic_img_size=True, depth=1), random_images(2, 3, 40, 48)
    expected, operators = model(x), set()

    def compiler(graph, inputs):
        operators.update(str(node.target) for node in graph.graph.nodes if node.op.startswith("call_"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    actual = torch.compile(model, fullgraph=True, backend=compiler)(x)
    # On CPUs, convolutions are compiled as sums of products, because TorchInductor fails for dynamic batch sizes.
    assert not [name for name in operators if "conv" in name]
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(actual, model), gradients(expected, model))


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch.compile says there that it exports")
def test_compiles_for_a_second_image_size():
    """A model compiles for a symbolic image size, although PyTorch cannot differentiate a resize to a symbolic size."""
    model = small("vil_tiny", dynamic_img_size=True, depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for height in (48, 80):
        x = random_images(2, 3, height, 48)
        torch._dynamo.mark_dynamic(x, 2)  # dimension 2, the image height, becomes symbolic
        actual, expected = compiled(x), model(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gradients(actual, model), gradients(expected, model))


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny", "vil_tiny_pooled"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_exported_traced_and_quantized_models_compute_the_models_outputs(name):
    """torch.export, torch.jit.trace with gradients (as in tensorboard's add_graph) and FX feature extraction compute
    the model's outputs, and quantize_dynamic approximates them.
    """
    model, x = small(name).eval(), random_images(3, 3, 48, 48)
    expected = model(x)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
    traced = torch.jit.trace(model, x[:2])
    torch.testing.assert_close(traced(x), expected)
    dx, truth = (torch.autograd.grad(m(y := x.clone().requires_grad_()).square().sum(), y)[0] for m in (traced, model))
    torch.testing.assert_close(dx, truth, rtol=1e-4, atol=1e-5)
    nodes = feature_extraction.get_graph_node_names(model)[1]
    behind = [node for node in nodes if node.startswith("blocks.1.add")][-1]
    graph = feature_extraction.create_feature_extractor(model, {behind: "map", "head": "logits"})
    found = graph(x)
    torch.testing.assert_close(found["logits"], expected)
    (maps,) = model.forward_intermediates(x, indices=[1], intermediates_only=True, norm=False)
    torch.testing.assert_close(split_class_token(found["map"])[0], maps.flatten(2).mT)
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert "DynamicQuantized" in repr(quantized.blocks[0].mixer)
    assert 0 < (quantized(x) - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_per_image_gradients_by_torch_func_equal_those_of_backward(name):
    model = randomised(small(name)).eval().float()
    x, classes = random_images(3, 3, 48, 48), torch.tensor([1, 0, 6])
    weights = {key: p.detach() for key, p in model.named_parameters()}

    def loss(weights, image, number):
        return F.cross_entropy(torch.func.functional_call(model, weights, (image[None],)), number[None])

    gradient = torch.func.grad(loss)
    found = torch.func.vmap(gradient, (None, 0, 0))(weights, x, classes)
    for i in range(3):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), classes[i : i + 1]).backward()
        for key, p in model.named_parameters():
            torch.testing.assert_close(found[key][i], p.grad, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(lambda image: model(image[None])[0])(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="a scan is differentiable once"):
        torch.func.grad(lambda image: torch.func.grad(loss, 1)(weights, image, classes[0]).square().sum())(x[0])
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(model, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        model.requires_grad_(False)(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["vil_tiny", "vil_tiny_pooled", "vim_tiny", "vim_tiny_pooled"])
def test_every_model_rejects_gradient_penalties_with_the_same_message(name, fused, monkeypatch):
    monkeypatch.setattr(dispatch, "_fused", fused)
    model, x = randomised(small(name)).float(), random_images(2, 3, 48, 48).requires_grad_()
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    (again,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.testing.assert_close(again, dx, rtol=1e-3, atol=1e-5)
    with pytest.raises(NotImplementedError, match="differentiable once.*gradient penalties"):
        torch.autograd.grad(again.square().sum(), x, retain_graph=True)  # second derivative with respect to x
    with pytest.raises(NotImplementedError, match="differentiable once.*gradient penalties"):
        again.square().sum().backward()


@KINDS
def test_a_replaced_step_projection_adds_its_bias_once(name):
    model, x = randomised(small(name)).eval().float(), random_images(2, 3, 48, 48)
    expected = model(x)
    for direction in model.blocks[0].mixer.directions:
        ours, (D, R) = direction.step_proj.state_dict(), direction.step_proj.weight.shape
        direction.step_proj = torch.nn.Linear(R, D)  # LoRA packages also replace a layer with a layer of another class
        direction.step_proj.load_state_dict(ours)
    torch.testing.assert_close(model(x), expected)


@KINDS
def test_a_wrapped_step_projection_keeps_its_bias(name):
    class Wrapper(torch.nn.Module):  # as in a user's own LoRA, without the attribute `bias`
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x)

    model, x = randomised(small(name)).eval().float(), random_images(2, 3, 48, 48)
    expected = model(x)
    for direction in model.blocks[0].mixer.directions:
        direction.step_proj = Wrapper(direction.step_proj)
    torch.testing.assert_close(model(x), expected)


@KINDS
def test_weights_may_be_plain_tensors_instead_of_parameters(name):
    model, x = randomised(small(name)).eval().float(), random_images(2, 3, 48, 48)
    expected = model(x)
    for module in model.blocks.modules():  # as in FSDP version 1 with use_orig_params=False
        for key, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, key)
            setattr(module, key, parameter.detach())
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("pool", [None, "rows"])
def test_a_subclass_of_a_mixer_can_replace_the_gate(pool):
    class Closed(LonghornMixer):
        def gate(self, y_BLD, z_BLD):
            return 0 * y_BLD

    block = Block(16, Closed, pool=pool)
    x = random_images(2, 10, 16)
    torch.testing.assert_close(block(x, (3, 3)), x)


def test_registered_with_timm():
    names = [f"{kind}_{size}" for kind in ("vil", "vim") for size in ("base", "small", "tiny")]
    assert timm.list_models(module="vision_longhorn", exclude_filters="*_pooled") == names
    assert timm.list_models("*_pooled", module="vision_longhorn") == [f"{name}_pooled" for name in names]
    for name in timm.list_models(module="vision_longhorn"):
        model = small(name, device="meta")
        assert isinstance(model, vil.VisionLonghorn)
        assert (model.pooled, type(model.blocks[0].mixer)) == (
            "pooled" in name,
            LonghornMixer if "vil" in name else MambaMixer,
        )
        assert model.num_features == model.head_hidden_size == model.embed_dim == 32
        assert model(torch.empty(2, 3, 48, 48, device="meta")).shape == (2, 7)
        if f"{name}.tiny_in200" not in timm.list_pretrained("vi*"):
            with pytest.raises(RuntimeError, match=f"{name} has no pretrained weights"):
                small(name, pretrained=True)
        # Code that strips prefix tokens must find none, because the class token is in the middle.
        assert model.num_prefix_tokens == 0


@pytest.mark.parametrize("name", ["vil_tiny", "vim_base"])
def test_the_pretrained_config_equals_vims_evaluation_preprocessing(name):
    model = timm.create_model(name, depth=1, device="meta")
    data, config = timm.data.resolve_model_data_config(model), model.pretrained_cfg
    assert data == dict(
        input_size=(3, 224, 224), interpolation="bicubic", crop_pct=0.875, crop_mode="center",
        mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),
    )  # fmt: skip
    assert (config["num_classes"], config["fixed_input_size"], config["license"]) == (1000, True, "apache-2.0")
    assert not config.get("url")
    parameters = {name for name, _ in model.named_parameters()}
    assert {config["first_conv"] + ".weight", config["classifier"] + ".weight"} <= parameters


def test_a_model_name_registered_by_another_package_is_not_overwritten(monkeypatch):
    def vil_tiny():
        pass

    vil_tiny.__module__ = "vision_lstm.models"
    with monkeypatch.context() as patch:
        patch.setitem(_registry._model_entrypoints, "vil_tiny", vil_tiny)
        with pytest.raises(RuntimeError, match="vision_lstm.models has already registered this name"):
            vision_longhorn.register(vision_longhorn.vil_tiny)
        assert timm.models.model_entrypoint("vil_tiny") is vil_tiny
    assert timm.models.model_entrypoint("vil_tiny") is vision_longhorn.vil_tiny
    # registering twice works, as when a notebook reloads the module
    assert vision_longhorn.register(vision_longhorn.vil_tiny) is vision_longhorn.vil_tiny
