"""Tests of the embedding's kernels, emulated on a CPU or on a GPU, and of the calls that run PyTorch code instead."""

import copy

import emulator
import pytest
import timm
import torch
from blocks import close
from emulator import EMULATED
from scans import relative_error
from spills import NVRTC, assert_no_spills
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from vil.kernels.cuda import launches, products
from vil.kernels.cuda.elements import ELEMENT
from vil.kernels.cuda.plan import Plan
from vil.kernels.embedding import add_embeddings, embed_op, patchify
from vil.models import dispatch
from vil.models.patches import PatchEmbed
from vil.models.vision_longhorn import VisionLonghorn

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = [pytest.param("cpu", marks=EMULATED, id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu)]
# (images, patch grid, patch size, width): odd grids, a single row, column or patch, and patches of 4 to 16 pixels
SHAPES = [
    (5, (3, 5), (8, 8), 40), (2, (1, 7), (16, 16), 64), (9, (6, 1), (4, 4), 4), (1, (1, 1), (8, 4), 12),
    (3, (9, 9), (2, 16), 36), (30, (1, 2), (4, 4), 8),
]  # fmt: skip
GPU_SHAPES = [*SHAPES, (128, (14, 14), (16, 16), 384), (1, (14, 14), (16, 16), 192), (70, (39, 40), (8, 8), 192)]


def on(shape):
    return [pytest.param("cpu", shape, marks=EMULATED, id=f"emulated-{shape}")] * (shape in SHAPES) + [
        pytest.param("cuda", shape, marks=pytest.mark.gpu)
    ]


def on_an_emulated_gpu(monkeypatch, multiprocessors=1):
    """Run the kernels on an emulated GPU for images on a CPU."""
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors)
    monkeypatch.setattr(products, "mm_in_fp32", lambda a, b: a.float() @ b.float())
    monkeypatch.setattr(embed_op, "runs_kernels", lambda images: images.device.type == "cpu")


@NVRTC
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_the_embedding_compile_without_spills(arch):
    kernels = [
        (patchify.SOURCE, arch, patchify.macros_of(BF16, pixel, channels, (size, size)))
        for pixel, channels, size in ((FP32, 3, 16), (BF16, 3, 16), (FP32, 12, 8))
    ]
    kernels += [
        (add_embeddings.SOURCE, arch, add_embeddings.macros_of(BF16, parameter, C))
        for parameter, C in ((FP32, 192), (FP32, 384), (BF16, 768))
    ]
    assert_no_spills(kernels)


@pytest.mark.parametrize(("device", "shape"), [case for shape in GPU_SHAPES for case in on(shape)])
@pytest.mark.parametrize("pixel", ELEMENT)
def test_patchify_copies_and_rounds_every_pixel(pixel, device, shape, monkeypatch, poison):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch)
    B, (h, w), size, _ = shape
    for channels in (3, 1) if device == "cuda" or pixel is FP32 else (3,):
        images = torch.randn(B, channels, h * size[0], w * size[1], device=device).to(pixel)
        for dtype in (BF16, FP16):
            assert torch.equal(patchify.patchify(images, size, dtype), patchify.reference(images, size, dtype))


@pytest.mark.parametrize(("device", "shape"), [case for shape in GPU_SHAPES for case in on(shape)])
@pytest.mark.parametrize(("dtype", "parameter"), [(BF16, FP32), (FP16, FP32), (BF16, BF16)])
def test_embeddings_and_their_gradients_equal_the_references(dtype, parameter, device, shape, monkeypatch, poison):
    B, (h, w), _, C = shape
    L = h * w + 1
    for multiprocessors in (1, 4) if device == "cpu" else (None,):
        if device == "cpu":
            on_an_emulated_gpu(monkeypatch, multiprocessors)
        projected = torch.randn(B, L - 1, C, device=device).to(dtype)
        parameters = [torch.randn(size, device=device).to(parameter) for size in ((C,), (C,), (L, C))]
        x = add_embeddings.add_embeddings(projected, *parameters)
        assert x.dtype == FP32
        close(x, add_embeddings.reference(projected.double(), *[t.double() for t in parameters]), FP32, "x")

        dx = torch.randn(B, L, C, device=device)
        dx[:, (L - 1) // 2] *= 1e30  # a gradient of the class token must not be rounded to infinity in dprojected
        results, again = [add_embeddings.embedding_gradients(dx, dtype, parameter) for _ in range(2)]
        assert all(map(torch.equal, results, again))
        expected, sums = add_embeddings.reference_gradients(dx.double())
        assert torch.equal(results[0], expected.to(dtype))
        for token in range(L) if L < 300 else (0, (L - 1) // 2, L - 1):
            close(results[1].sum(0)[token], sums[0, token], FP32, "sums")


@EMULATED
def test_offsets_of_more_than_32_bits_of_the_embedding_emulated(monkeypatch):
    """All images except the last are 0, and only the last CTAs of each grid run."""
    if not emulator.has_sparse():
        pytest.skip("needs memory that is not reserved")
    on_an_emulated_gpu(monkeypatch, multiprocessors=2**40)
    # the images have 2^32 pixels and a few more, and the tokens have 2^32 channels and a few more
    B, size, C = 2**20 + 4, (32, 32), 4096
    with emulator.sparse_where_large() as launch:
        monkeypatch.setattr(launches, "launch", launch)
        images = emulator.sparse((B * 4 // 3 + 1, 3, 32, 32), BF16)
        images[-1] = torch.randn(3, 32, 32)
        assert torch.equal(patchify.patchify(images, size, BF16)[-1:], patchify.reference(images[-1:], size, BF16))

        projected, dx = emulator.sparse((B, 1, C), BF16), emulator.sparse((B, 2, C))
        projected[-1], dx[-1] = torch.randn(1, C), torch.randn(2, C)
        parameters = [torch.randn(size) for size in ((C,), (C,), (2, C))]
        x = add_embeddings.add_embeddings(projected, *parameters)
        close(x[-1:], add_embeddings.reference(projected[-1:].double(), *[t.double() for t in parameters]), FP32, "x")
        dprojected, sums = add_embeddings.embedding_gradients(dx, BF16, FP32)
        expected, _ = add_embeddings.reference_gradients(dx[-1:])
        assert torch.equal(dprojected[-1:], expected.to(BF16))
        assert sums.numel() > 2**31
        assert torch.equal(sums[-1], dx[-1])


def make_model(shape=SHAPES[0], device="cpu", dtype=FP32, **kwargs):
    """Return a model without blocks, with random parameters of the embedding."""
    _, (h, w), size, C = shape
    img_size = h * size[0], w * size[1]
    model = VisionLonghorn(img_size=img_size, patch_size=size, embed_dim=C, depth=0, num_classes=0, **kwargs)
    with torch.no_grad():
        for p in (model.patch_embed.proj.bias, model.cls_token, model.pos_embed):
            p.normal_()
    return model.to(device, dtype)


def embedded(model, images, dy, fused, autocast=None):
    """Return the tokens and a dict of all gradients, computed by kernels if `fused`, otherwise by PyTorch code."""
    model.zero_grad()
    dispatch.set_fused(fused)
    with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
        x = model.embed(images)
    assert ("_Embedding" in type(x.grad_fn).__name__) == fused
    x.backward(dy)
    return x.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("device", "shape"), [case for shape in GPU_SHAPES for case in on(shape)])
@pytest.mark.parametrize(
    ("autocast", "parameter", "pixel"), [(BF16, FP32, FP32), (FP16, FP32, BF16), (BF16, BF16, FP32), (None, BF16, BF16)]
)
def test_a_model_embeds_like_pytorch_code(autocast, parameter, pixel, device, shape, monkeypatch, poison):
    """Tokens equal PyTorch's up to the order of sums. Errors of gradients are at most 1.1 times PyTorch's."""
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch, 4)
    model = make_model(shape, device, parameter)
    B, C, L = shape[0], shape[3], model.pos_embed.shape[1]
    images = torch.randn(B, 3, *model.patch_embed.img_size, device=device).to(pixel)
    dy = torch.randn(B, L, C, device=device)
    (x, found), (again, of_again), (plain, of_plain) = [
        embedded(model, images, dy, fused, autocast) for fused in (True, True, False)
    ]
    _, truth = embedded(copy.deepcopy(model).double(), images.double(), dy.double(), False)
    assert torch.equal(x, again)
    assert x.dtype == plain.dtype == FP32
    assert relative_error(x, plain) < 1e-3  # products on a GPU add in another order before they are rounded
    if device == "cpu":
        assert torch.equal(x, plain)
    assert found.keys() == of_plain.keys() == truth.keys()
    for name, value in found.items():
        assert torch.equal(value, of_again[name]), name
        assert (value.dtype, value.shape) == (parameter, truth[name].shape), name
        assert relative_error(value, truth[name]) < 1.1 * relative_error(of_plain[name], truth[name]) + 1e-6, name
    storages = {value.untyped_storage().data_ptr() for value in found.values()}
    assert len(storages) == len(found)  # an in-place change of one gradient must not change another one
    with torch.inference_mode(), torch.autocast(device, autocast, enabled=autocast is not None):
        dispatch.set_fused(True)
        assert relative_error(model.embed(images), x) < 1e-3


@EMULATED
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
def test_replayed_plans_of_the_emulated_embedding_equal_the_recorded_functions(shape, monkeypatch, poison):
    launch = launches.launch
    on_an_emulated_gpu(monkeypatch)
    B, (h, w), size, C = shape
    L = h * w + 1
    images, dx = torch.randn(B, 3, h * size[0], w * size[1]), torch.randn(B, L, C)
    weights = torch.randn(C, 3, *size), torch.randn(C), torch.randn(1, 1, C), torch.randn(1, L, C)
    expected = embed_op.forward.__wrapped__(BF16, True, images, *weights)
    of_backward = embed_op.backward.__wrapped__(FP32, dx, expected[1])
    monkeypatch.setattr(launches, "launch", launch)
    monkeypatch.setattr(launches.Launch, "run_with", emulator.run_with)
    for keep in (True, False):
        plan = Plan(embed_op.forward.__wrapped__, (BF16, keep, images, *weights), torch.device("cpu"))
        x, patches = plan([images, *weights])
        assert torch.equal(x, expected[0])
        assert torch.equal(patches, expected[1]) if keep else patches is None
    plan = Plan(embed_op.backward.__wrapped__, (FP32, dx, expected[1]), torch.device("cpu"))
    assert all(map(torch.equal, plan([dx, expected[1]]), of_backward))


@pytest.mark.parametrize("C", [192, 384, 768])
def test_plans_of_training_allocate_all_memory_in_advance(C, monkeypatch):
    """CUDA graphs of a plan require memory that is allocated before the first launch."""
    monkeypatch.setattr("vil.kernels.cuda.hardware.multiprocessors", lambda device: 132)
    shapes = (128, 3, 224, 224), (C, 3, 16, 16), (C,), (1, 1, C), (1, 197, C), (128, 197, C)
    *inputs, dx = [torch.empty(shape, device="meta") for shape in shapes]
    patches = torch.empty(128, 196, 768, dtype=BF16, device="meta")
    assert Plan(embed_op.forward.__wrapped__, (BF16, True, *inputs), dx.device).allocations
    assert Plan(embed_op.backward.__wrapped__, (FP32, dx, patches), dx.device).allocations


def hooked(hook, module):
    return lambda model: getattr(model.get_submodule(module), f"register_{hook}_hook")(lambda *_: None)


class Subclass(PatchEmbed):
    pass


def with_subclass(model):
    model.patch_embed.__class__ = Subclass


def with_subclass_of_tensors(model):
    model.pos_embed = nn.Parameter(TwoTensor(*2 * [model.pos_embed.detach()]))


def unaligned(elements):
    def change(model):
        model.cls_token = nn.Parameter(torch.randn(40 + elements)[elements:].view(1, 1, 40))

    return change


def with_parameter(module, name, *shape):
    return lambda model: setattr(model.get_submodule(module), name, nn.Parameter(torch.randn(shape)))


UNFUSED = {
    **{
        f"a {hook} hook on {module}": hooked(hook, module)
        for hook in ("forward", "forward_pre", "full_backward") for module in ("patch_embed", "patch_embed.proj")
    },
    "a forward of an instance": lambda model: setattr(model.patch_embed, "forward", model.patch_embed.forward),
    "a subclass": with_subclass,
    "another patch embedding": lambda model: setattr(model, "patch_embed", nn.Identity()),
    "another projection": lambda model: setattr(model.patch_embed, "proj", nn.Conv2d(3, 40, 8, 8)),
    "a subclass of tensors": with_subclass_of_tensors,
    "a parameter that starts at an address of 4 modulo 16": unaligned(1),
    "a parameter that starts at an address of 8 modulo 16": unaligned(2),
    "a bias for few channels": with_parameter("patch_embed.proj", "bias", 4),
    "one bias for all channels": with_parameter("patch_embed.proj", "bias", 1),
    "a class token with few channels": with_parameter("", "cls_token", 1, 1, 8),
    "a class token with many channels": with_parameter("", "cls_token", 1, 1, 80),
    "a frozen parameter": lambda model: model.pos_embed.requires_grad_(False),
    "parameters of different dtypes": lambda model: model.patch_embed.bfloat16(),
}  # fmt: skip


@EMULATED
@pytest.mark.parametrize("change", UNFUSED)
def test_changed_patch_embeddings_run_pytorch_code(change, monkeypatch):
    model, images = make_model(), torch.randn(2, 3, 24, 40)
    on_an_emulated_gpu(monkeypatch)
    assert run(model, images) is not None
    UNFUSED[change](model)
    assert run(model, images) is None


def run(model, images, autocast=BF16):
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        classes = [PatchEmbed, type(make_model().patch_embed.proj)]
        return dispatch.run_embedding(images, model.patch_embed, classes, model.cls_token, model.pos_embed)


@EMULATED
def test_unsupported_images_run_pytorch_code(monkeypatch):
    model, images = make_model(), torch.randn(2, 3, 24, 40)
    assert run(model, images) is None  # images on a CPU
    on_an_emulated_gpu(monkeypatch)
    assert run(model, images) is not None
    assert run(make_model(dynamic_img_size=True), images) is not None
    assert run(model, images, autocast=None) is None
    assert run(model, images.bfloat16(), autocast=None) is None
    assert run(model.bfloat16(), images, autocast=None) is None
    assert run(model, images.bfloat16(), autocast=None) is not None
    model = make_model()
    dispatch.set_fused(False)
    assert run(model, images) is None
    dispatch.set_fused(True)
    for other in (
        images.double(), images.to(memory_format=torch.channels_last), images[:0], images[0], images[:, :2],
        images.transpose(2, 3).contiguous(), images.clone().requires_grad_(), torch.randn(5761)[1:].view(2, 3, 24, 40),
    ):  # fmt: skip
        assert run(model, other) is None, other.shape
    assert run(make_model(dynamic_img_size=True), torch.randn(2, 3, 48, 40)) is None
    for shape in ((2, (4, 4), (8, 2), 40), (2, (4, 4), (8, 8), 42)):  # the kernels need widths that 4 divides
        assert run(make_model(shape), torch.randn(2, 3, 32, 4 * shape[2][1])) is None
    overlapping = VisionLonghorn(32, patch_size=16, stride=8, embed_dim=32, depth=0, num_classes=0)
    assert run(overlapping, torch.randn(2, 3, 32, 32)) is None
    strided = VisionLonghorn((32, 24), patch_size=(16, 8), stride=(8, 16), embed_dim=32, depth=0, num_classes=0)
    assert run(strided, torch.randn(2, 3, 32, 24)) is None  # as many patches as without overlap
    padded = VisionLonghorn(28, patch_size=8, embed_dim=32, depth=0, num_classes=0, dynamic_img_size=True)
    assert run(padded, torch.randn(2, 3, 28, 28)) is None


@EMULATED
def test_a_second_derivative_of_the_embedding_raises_an_error(monkeypatch):
    on_an_emulated_gpu(monkeypatch)
    model = make_model()
    with torch.autocast("cpu", BF16):
        x = model.embed(torch.randn(2, 3, 24, 40))
    (gradient,) = torch.autograd.grad(x.square().sum(), model.pos_embed, create_graph=True)
    with pytest.raises(NotImplementedError, match="once"):
        gradient.sum().backward()


@EMULATED
@pytest.mark.parametrize("layout", ["expanded", "transposed", "unaligned"])
def test_gradients_of_tokens_may_have_any_layout(layout, monkeypatch):
    on_an_emulated_gpu(monkeypatch)
    model, images, (B, L, C) = make_model(), torch.randn(5, 3, 24, 40), (5, 16, 40)
    dy = {
        "expanded": torch.randn(1, 1, C).expand(B, L, C), "transposed": torch.randn(C, L, B).transpose(0, 2),
        "unaligned": torch.randn(1 + B * L * C)[1:].view(B, L, C),
    }[layout]  # fmt: skip
    _, found = embedded(model, images, dy, True, BF16)
    _, expected = embedded(model, images, dy.clone(memory_format=torch.contiguous_format), True, BF16)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@EMULATED
def test_an_image_with_more_tokens_than_the_gpu_processes_at_once(monkeypatch):
    """One partial sum remains if the CTAs of a single image fill the GPU."""
    on_an_emulated_gpu(monkeypatch, multiprocessors=1)
    dx = torch.randn(3, 300, 200)
    dprojected, sums = add_embeddings.embedding_gradients(dx, BF16, FP32)
    expected, expected_sums = add_embeddings.reference_gradients(dx.double())
    assert torch.equal(dprojected, expected.to(BF16))
    assert sums.shape == expected_sums.shape
    close(sums, expected_sums, FP32, "sums")


@EMULATED
@pytest.mark.parametrize("trained", [True, False])
def test_patches_are_kept_only_for_the_backward_pass(trained, monkeypatch):
    on_an_emulated_gpu(monkeypatch)
    kept, forward = [], embed_op.forward
    monkeypatch.setattr(
        embed_op, "forward", lambda dtype, keep, *tensors: kept.append(keep) or forward(dtype, keep, *tensors)
    )
    with torch.set_grad_enabled(trained):
        run(make_model(), torch.randn(2, 3, 24, 40))
    assert kept == [trained]


@pytest.mark.gpu
def test_observed_calls_run_pytorch_code_on_a_gpu():
    """A dispatch mode, a functional transform, forward-mode differentiation and a compiler see PyTorch operators."""
    model, images = make_model(device="cuda"), torch.randn(2, 3, 24, 40, device="cuda")

    def node(embed=model.embed):
        with torch.autocast("cuda", BF16):
            return type(embed(images).grad_fn).__name__

    assert "_Embedding" in node()
    with FlopCounterMode(display=False):
        assert "_Embedding" not in node()
    with forward_ad.dual_level():
        assert "_Embedding" not in node()
    assert "_Embedding" not in node(torch.compile(model.embed, backend="aot_eager"))
    x, dx = torch.randn_like(images), torch.randn_like(images)
    with torch.autocast("cuda", BF16):
        _, tangent = torch.func.jvp(model.embed, (x,), (dx,))
    assert tangent.abs().max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vil_tiny_pooled", "vil_tiny"])
def test_a_whole_model_trains_with_and_without_kernels_of_the_embedding(name, monkeypatch):
    """Logits and gradients equal those of a model whose embedding runs as PyTorch code; also in CUDA graphs."""
    model = timm.create_model(name, img_size=64, depth=2, num_classes=5).cuda()
    images = torch.randn(8, 3, 64, 64, device="cuda")

    def step():
        model.zero_grad()
        with torch.autocast("cuda", BF16):
            y = model(images)
        y.float().square().mean().backward()
        return [y.detach(), *[p.grad for p in model.parameters()]]

    found = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            again = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    monkeypatch.setattr(embed_op, "runs_kernels", lambda images: False)
    for others, tolerance in ((again, 1e-6), (captured, 1e-6), (step(), 0.03)):
        for value, other in zip(found, others, strict=True):
            assert relative_error(value, other) <= tolerance
