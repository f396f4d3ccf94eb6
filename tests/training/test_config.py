"""Tests of options: files in configs/, precedence, value types and rejected values."""

import contextlib
import math
import os
import re

import pytest
import yaml
from processes import ROOT

from vil.config import FIELDS, SYNONYMS, Config, ConfigError, load_config, parse_key_values
from vil.config.values import convert, kind_of
from vil.security.checkpoint_options import options_of_checkpoint

# Hyperparameters in ViM's published main.py, pt-vim-t.sh and pt-vim-s.sh, and defaults of this package's own options.
# Options of transforms that ViM does not set have timm's defaults. ViM's scripts disable amp, unlike our recipes.
SHARED = dict(
    epochs=300, opt="adamw", opt_betas=(0.9, 0.999), opt_eps=1e-8, sched="cosine", warmup_epochs=5, min_lr=1e-5,
    aa="rand-m9-mstd0.5-inc1", color_jitter=0.3, train_interpolation="bicubic", scale=(0.08, 1.0),
    ratio=(3 / 4, 4 / 3), hflip=0.5, reprob=0.25, remode="pixel", mixup=0.8, cutmix=1.0, mixup_prob=1.0,
    mixup_switch_prob=0.5, smoothing=0.1, aug_repeats=3, model_ema=True, model_ema_decay=0.99996, clip_grad=None,
    layer_decay=None, crop_pct=0.875, interpolation="bicubic", img_size=None, train_split="train",
    val_split="validation", pretrained_path=None, seed=0, grad_checkpointing=False, torchcompile=False, amp=True,
    amp_dtype="bfloat16", synthetic=0, dataset="", data_dir=None, bce_loss=False, teacher=None, phases=None,
)  # fmt: skip
TRAINED = dict(warmup_lr=1e-6, model_kwargs={}, batch_size=None, lr=1e-3)
SIZES = {
    "tiny": TRAINED | dict(global_batch_size=1024, weight_decay=0.1, drop_path=0.0),
    "small": TRAINED | dict(global_batch_size=512, weight_decay=0.05, drop_path=0.05),
}
PLUS = dict(epochs=30, global_batch_size=1024, batch_size=128, lr=1e-5, warmup_lr=1e-5, min_lr=1e-5)
PLUS |= dict(weight_decay=1e-8, drop_path=0.0, model_kwargs={"stride": 8})
STRIDE_8 = ("stride8", "tiny", PLUS)


def test_every_config_loads_and_is_named_after_its_run():
    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert [load_config("", ["-c", str(path)]).experiment for path in paths] == [path.stem for path in paths]
    assert load_config("", ["--model", "vim_small", "--resume", "x.pt"]).experiment == "vim_small"
    assert load_config("", ["-c", str(paths[0]), "--experiment", "mine"]).experiment == "mine"


def test_model_arguments_on_the_command_line_override_single_arguments_of_the_config():
    config = load_config("", ["-c", str(ROOT / "configs/digits.yaml"), "--model-kwargs", "depth=2"])
    assert config.model_kwargs == dict(embed_dim=64, depth=2, patch_size=8)
    cleared = load_config("", ["-c", str(ROOT / "configs/digits.yaml"), "--model-kwargs", "none"])
    assert cleared.model_kwargs == {}


@pytest.mark.parametrize(("name", "size", "recipe"), [("vil_tiny", "tiny", {}), ("vil_small", "small", {}), STRIDE_8])
def test_recipes_equal_vims_published_ones(name, size, recipe):
    path = ROOT / f"configs/{name}.yaml"
    expected = SHARED | SIZES[size] | recipe | dict(model=f"vil_{size}", experiment=name)
    config = load_config("", ["-c", str(path)])
    assert {option: getattr(config, option) for option in expected} == expected
    assert set(SHARED) - set(yaml.safe_load(path.read_text())) <= {  # options that a recipe may omit
        "scale", "ratio", "hflip", "clip_grad", "layer_decay", "img_size", "train_split", "val_split", "data_dir",
        "pretrained_path", "seed", "grad_checkpointing", "torchcompile", "amp", "amp_dtype", "synthetic", "dataset",
        "bce_loss", "teacher", "phases",
    }  # fmt: skip
    baseline = load_config("", ["-c", str(path), "--model", f"vim_{size}", "--experiment", "baseline"])
    assert vars(baseline) == vars(config) | dict(model=f"vim_{size}", experiment="baseline")


# Options of the commands in Mamba-Reg's README. The learning rates 5e-4 and 2e-4 are for a batch of 512 images.
MAMBA_REG = [
    dict(epochs=300, img_size=128, global_batch_size=8 * 128, lr=5e-4 * 2, weight_decay=0.05, smoothing=0.0, aa="3a"),
    dict(epochs=100, img_size=224, global_batch_size=8 * 128, lr=2e-4 * 2, weight_decay=0.05, smoothing=0.0, aa="3a"),
    dict(epochs=20, img_size=224, global_batch_size=8 * 64, lr=1e-5, weight_decay=0.1, aug_repeats=0, crop_pct=1.0),
]


@pytest.mark.parametrize("size", SIZES)
def test_longer_recipes_differ_from_vims_only_in_named_options(size):
    vims, phases, best = (
        load_config("", ["-c", str(ROOT / f"configs/vil_{size}{name}.yaml")]) for name in ("", "_phases", "_best")
    )
    assert vars(best) == vars(vims) | dict(teacher="regnety_160.deit_in1k", experiment=f"vil_{size}_best")
    common = dict(reprob=0.0, phases=phases.phases, experiment=f"vil_{size}_phases")
    for number, published in enumerate(MAMBA_REG):
        assert vars(phases.of_phase(number)) == vars(vims) | common | published


def test_default_options_equal_the_tiny_recipe():
    config = Config()
    expected = SHARED | SIZES["tiny"] | dict(model="vil_tiny", checkpoint_interval="30m", log_interval=50)
    expected |= dict.fromkeys(
        ["workers", "opt_betas", "opt_eps", "crop_pct", "interpolation", "resume", "device", "augment_on_device"]
    )
    expected |= dict(output="output", log_tensorboard=False, log_wandb=False)
    assert {option: getattr(config, option) for option in expected} == expected


def test_the_command_line_overrides_the_file(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 5e-4\nepochs: 7\nmodel_ema: true\nopt_betas: [0.8, 0.9]\nseed: 3\n")
    words = "--epochs 3 --no-model-ema --model-kwargs depth=2 embed_dim=64 --aa none --scale 0.5 1 --seed 0"
    config = load_config("", ["-c", str(tmp_path / "c.yaml"), "--opt-betas", "none", *words.split()])
    assert (config.lr, config.epochs, config.model_ema, config.opt_betas) == (5e-4, 3, False, None)
    assert (config.model_kwargs, config.aa, config.scale) == ({"depth": 2, "embed_dim": 64}, None, (0.5, 1.0))
    assert (config.seed, config.min_lr, config.experiment) == (0, 1e-5, "c")


@pytest.mark.parametrize(("words", "images"), [([], 0), (["--synthetic"], 1_281_167), (["--synthetic", "99"], 99)])
def test_synthetic_has_imagenets_number_of_images_by_default(words, images):
    assert load_config("", words).synthetic == images


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        # 1e-3 becomes a number, although PyYAML reads 1e-3 as a string
        ("lr", "1e-3", 0.001), ("lr", "1", 1.0), ("clip_grad", "5", 5.0), ("clip_grad", "null", None),
        ("phases", "[{lr: 1e-3}]", [dict(lr=0.001)]),
        ("clip_grad", "none", None), ("epochs", "7.0", 7), ("img_size", "'null'", None), ("batch_size", "32", 32),
        ("experiment", "2024", "2024"), ("checkpoint_interval", "500", "500"), ("checkpoint_interval", "null", None),
        ("aa", "null", None), ("aa", "3a", "3a"), ("opt_betas", "[0.8, 1]", (0.8, 1.0)), ("opt_betas", "none", None),
        ("train_interpolation", "random", "random"),
        ("model_kwargs", "{depth: 2, patch_size: [8, 4]}", {"depth": 2, "patch_size": [8, 4]}),
        ("model_kwargs", "null", {}), ("amp", "false", False),
    ],
)  # fmt: skip
def test_values_are_converted_to_the_type_of_their_option(tmp_path, option, text, value):
    (tmp_path / "c.yaml").write_text(f"{option}: {text}")
    found = getattr(load_config("", ["-c", str(tmp_path / "c.yaml")]), option)
    assert (found, type(found)) == (value, type(value))


ABOVE_0, OPEN = math.nextafter(0, 1), math.inf
RANGES = {
    (0, OPEN): "synthetic warmup_epochs aug_repeats lr weight_decay warmup_lr min_lr color_jitter mixup cutmix",
    (1, OPEN): "num_classes img_size epochs global_batch_size batch_size log_interval",
    (0, 1): "opt_betas model_ema_decay hflip reprob mixup_prob mixup_switch_prob smoothing bce_target_thresh "
    "distillation_alpha",
    (ABOVE_0, OPEN): "opt_eps layer_decay clip_grad scale ratio distillation_tau",
    (0, 1024): "workers", (0, 0.99): "drop_path", (ABOVE_0, 2): "crop_pct", (0, 2**32 - 1): "seed",
    (ABOVE_0, 0.9): "val_fraction",
}  # fmt: skip


def test_numbers_must_be_within_their_range():
    ranges = {name: ends for ends, names in RANGES.items() for name in names.split()}
    differ = {*ranges} ^ {name for name in FIELDS if kind_of(name)[0] in (int, float, tuple)}
    assert not differ, f"RANGES must contain every numeric option, but these differ: {differ}"
    for name, ends in ranges.items():
        kind, _ = kind_of(name)
        for end, direction in zip(ends, (-1, 1)):
            beyond = end + direction if kind is int else math.nextafter(end, direction * math.inf)
            if end != OPEN:
                convert(name, [end] if kind is tuple else end, "x")
            with pytest.raises(ConfigError, match=f"option '{name}' in x must be "):
                convert(name, [beyond] if kind is tuple else beyond, "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weight_deacy: 0.1", "unknown option 'weight_deacy' in .*c.yaml; did you mean 'weight_decay'"),
        ("zzz: 1", "unknown option 'zzz' in .*c.yaml$"),
        ("epochs: many", "option 'epochs' in .*c.yaml must be an integer, got 'many'"),
        (
            "epochs: 2.7\nlr: fast\nremode: x\nlrr: 1",
            "^4 errors in .*c.yaml: .1. .*epochs.* .2. .*lr.* .3. .*lrr.* .4. unknown remode",
        ),
        ("epochs: 2.7", "option 'epochs' in .*c.yaml must be an integer, got 2.7"),
        ("epochs: .inf", "option 'epochs' in .*c.yaml must be an integer, got inf"),
        ("epochs: " + "x" * 300, r"option 'epochs' in .*c.yaml must be an integer, got 'x{196}\.\.\.$"),
        ("epochs: true", "option 'epochs' in .*c.yaml must be an integer, got True"),
        ("epochs: null", "option 'epochs' in .*c.yaml must be an integer, got None"),
        ("lr: true", "option 'lr' in .*c.yaml must be a number, got True"),
        ("model_ema: 3", "option 'model_ema' in .*c.yaml must be true or false, got 3"),
        ("model: true", "option 'model' in .*c.yaml must be a text, got True"),
        ("scale: 0.5", "option 'scale' in .*c.yaml must be a list of numbers, got 0.5"),
        ("model_kwargs: depth", "option 'model_kwargs' in .*c.yaml must be a mapping, got 'depth'"),
        ("model: vil_tinny", "model 'vil_tinny' is not a model of timm or this package; did you mean 'vil_tiny'"),
        ("amp_dtype: float8", "unknown amp_dtype 'float8'; did you mean 'float16'"),
        ("remode: pixels", "unknown remode 'pixels'; did you mean 'pixel'"),
        # adahessian needs second derivatives, but training frees the autograd graph after backward
        ("opt: adahessian", "unknown opt 'adahessian'"),
        ("opt: adan\nopt_betas: [0.9, 0.99]", r"opt_betas must be 3 numbers for adan, got \(0.9, 0.99\)"),
        ("ratio: [2, 1]", r"ratio must be two numbers, the smaller one first, got \(2.0, 1.0\)"),
        ("checkpoint_interval: 0", "checkpoint_interval must be minutes .'30m'. or optimizer steps .'500'., got '0'"),
        ("checkpoint_interval: 30m5", "checkpoint_interval must be .*got '30m5'"),
        ("lr: 1\nseed: 2\nlr: 3", "c.yaml: keys must be unique, got 'lr' again in line 3"),
        ("model_kwargs: {depth: 2, depth: 3}", "c.yaml: keys must be unique, got 'depth' again in line 1"),
        ("lr: 1\nseed: 010", "c.yaml: numbers must be decimal, got 010 in line 2"),
        ("seed: -0_10", "c.yaml: numbers must be decimal, got -0_10 in line 1"),
        ("lr: 1:30.5", "c.yaml: numbers must be decimal, got 1:30.5 in line 1"),
        ("- lr", "c.yaml must be a YAML mapping"),
        ("a: [", "c.yaml is not valid YAML"),
    ],
)
def test_an_invalid_config_file_is_rejected(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config("", ["-c", str(tmp_path / "c.yaml")])


# options of timm, DeiT, Lightning, Transformers and other programs, with the expected suggestion
THEIRS = """
Learning_Rate:lr accum_iter:batch_size adam_epsilon:opt_eps arch:model autoaugment:aa bce:bce_loss
bs:global_batch_size crop_size:img_size data_path:data_dir distillation_type:distillation eta_min:min_lr
finetune:pretrained_path gpus:device j:workers kd_loss_weight:distillation_alpha kd_model_name:teacher l2:weight_decay
llrd:layer_decay lr_scheduler_type:sched max_norm:clip_grad no_bf16:amp num_train_epochs:epochs optimizer:opt
random_erase:reprob run_name:experiment save_dir:output save_steps:checkpoint_interval stages:phases
stochastic_depth:drop_path teacher_path:teacher_checkpoint temperature:distillation_tau
use_checkpoint:grad_checkpointing warmup:warmup_epochs
"""


def test_names_of_options_in_other_packages_are_answered_with_a_suggestion(tmp_path):
    answers = dict(pair.split(":") for pair in THEIRS.split())
    for word, ours in answers.items():
        (tmp_path / "c.yaml").write_text(f"{word}: 1")
        flag, help = "--" + word.replace("_", "-"), re.escape(FIELDS[ours].metadata["help"])
        for words in (["-c", str(tmp_path / "c.yaml")], [flag, "1"], [f"{flag}=1"]):
            spelled = f"'{ours}'" if words[0] == "-c" else "--" + ours.replace("_", "-")
            with pytest.raises(ConfigError, match=f"^unknown option '{word}' .*; use {spelled}: {help}"):
                load_config("", words)
    others = [word for words in SYNONYMS.values() for word in words.split()]
    assert len(others) == len({*others} - {*FIELDS})  # a synonym belongs to one option and is not an option's name
    assert {*SYNONYMS} == {*answers.values()}


DIGITS = "9" * 5000  # Python does not convert integers of more than 4,300 digits


@pytest.mark.parametrize("text", [
    f"epochs: {DIGITS}", f"lr: -{DIGITS}", f"lr: {DIGITS}.0", "seed: 0x" + "f" * 5000, f"unknown: {DIGITS}",
    "seed: 0b" + "1" * 20000, f"experiment: {DIGITS}", f"model_kwargs: {{depth: {DIGITS}}}", f"epochs: '{DIGITS}'",
    f"phases: [{{epochs: {DIGITS}}}]", f"opt_betas: [{DIGITS}, 1]", f"img_size: [{DIGITS}, 16]", f"model: '{DIGITS}'",
    f"pin_mem: true\nvflip: {DIGITS}", "lr: 1e999", "lr: .inf", "epochs: 1.0e+999", "lr: " + "1:" * 3000 + "1",
    f"checkpoint_interval: {DIGITS}m", "model_kwargs: " + "[" * 700, "unknown: " + "{a: " * 3000 + "}" * 3000,
], ids=lambda text: text[:20])  # fmt: skip
def test_huge_numbers_and_deep_nesting_are_rejected_in_a_short_line(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("", ["-c", str(tmp_path / "c.yaml")])
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("words", [
    ["--epochs", DIGITS], ["--lr", "1e999"], ["--model-kwargs", f"depth={DIGITS}"], ["--img-size", DIGITS, "16"],
    ["--model-kwargs", "depth=" + "[" * 700], ["--phases", f"{{epochs: {DIGITS}}}"], ["--scale", "nan", "1"],
    ["--model", DIGITS], ["--input-size", "3", DIGITS, DIGITS], [f"--{DIGITS}", "1"], ["--opt", DIGITS],
], ids=lambda words: words[0][:20])  # fmt: skip
def test_huge_words_on_the_command_line_are_rejected_in_a_short_line(words):
    with pytest.raises(ConfigError) as caught:
        load_config("", words)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", FIELDS)
def test_a_huge_integer_in_a_checkpoint_raises_only_config_errors(name):
    huge = 10**5000
    for value in (huge, -huge, [huge], {"depth": huge}, [{"epochs": huge}]):
        with contextlib.suppress(ConfigError):
            options_of_checkpoint({name: value}, "x.pt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--weight-deacy 1", "unknown option 'weight_deacy' on the command line; did you mean --weight-decay"),
        ("--weight-deacy=1", "unknown option 'weight_deacy' on the command line; did you mean --weight-decay"),
        ("--epoch 3", "unknown option 'epoch' on the command line; did you mean --epochs"),
        ("photos vil_tiny", "only one folder is accepted, got 'photos' and 'vil_tiny'"),
        ("--data-dir=photos pets cats", "only one folder is accepted, got 'pets' and 'cats'"),
        ("photos --data-dir pets", "the folder is given twice, as 'photos' and --data-dir 'pets'"),
        ("photos --amp yes", "unexpected argument 'yes' on the command line: .* because --amp accepts no value"),
        ("--lr fast", "--lr must be a number, got 'fast'"),
        ("--model-kwargs depth", "form KEY=VALUE, got 'depth'"),
        ("-c nowhere.yaml", "config file nowhere.yaml does not exist; configs of this package are digits, "),
        ("--resume", "^argument --resume: expected one argument$"),
        ("--model-kwargs depth=2 drop_path_rate=0.1", "must not contain drop_path_rate; set --drop-path instead$"),
        (
            "--model-kwargs num_classes=3",
            "model_kwargs must not contain num_classes; set --num-classes instead$",
        ),
        ("--model-kwargs img_size=32", "model_kwargs must not contain img_size; set --img-size instead$"),
        ("--model-kwargs global_pool=''", "global_pool in model_kwargs must not be ''"),
        ("-c .", r"^\. is a folder, not a config file: pass a folder of images without -c$"),
        ("--layer-decay 75", "^--layer-decay must be at most 1, got '75'$"),
        ("--img-size 100000", "^--img-size must be at most 8192, got '100000'$"),
        ("--model-kwargs depth=0", "^depth must be at least 1, got 0$"),
        ("--model-kwargs embed_dim=-8", "^embed_dim must be at least 1, got -8$"),
        ("--model-kwargs patch_size=[16,0]", "^patch_size must be at least 1, got \\[16, 0\\]$"),
        ("--model-kwargs depth=two", "^depth must be an integer, got 'two'$"),
        ("--model-kwargs in_chans=1", "in_chans in model_kwargs must be 3, .*got 1"),
    ],
)
def test_an_invalid_command_line_is_rejected(words, message):
    with pytest.raises(ConfigError, match=message):
        load_config("", words.split())


def test_names_of_options_may_have_underscores_and_timms_short_forms():
    config = load_config(
        "", ["photos", "-b", "8", "-j", "3", "--global_batch_size=64", "--noamp", "--weight_decay", "0.2"]
    )
    assert (config.data_dir, config.batch_size, config.workers) == ("photos", 8, 3)
    assert (config.global_batch_size, config.amp, config.weight_decay) == (64, False, 0.2)
    assert load_config("", ["--data-dir=~/photos"]).data_dir == os.path.expanduser("~/photos")


@pytest.mark.parametrize("policy", ["rand-foo", "rand-m9-mstd", "rand-m9-tweight", "augmix-foo", "v0-foo", "foo"])
def test_a_policy_with_a_part_that_timm_would_ignore_is_rejected(policy):
    with pytest.raises(ConfigError, match=f"^aa must be a timm policy such as .*, got '{policy}': "):
        load_config("", ["--aa", policy])


# options that a user has set, in an args.yaml written by timm's train.py
SET = dict(
    aa="rand-m9-mstd0.5-inc1", amp=True, clip_grad=5.0, crop_pct=1.0, epochs=310, hflip=0.5, lr=0.005, min_lr=5e-6,
    mixup=0.8, model="deit_tiny_patch16_224", model_ema=True, model_ema_decay=0.9998, opt="lamb",
    opt_betas=[0.9, 0.999], reprob=0.25, sched="cosine", seed=31, torchcompile="inductor", train_interpolation="random",
    warmup_epochs=20, weight_decay=0.05, workers=8,
)  # fmt: skip
EMPTY = dict(
    bn_eps=None, class_map="", data=None, drop_path=None, experiment="", gp=None, img_size=None, initial_checkpoint="",
    interpolation="", jsd_loss=False, layer_decay=None, lr_noise=None, mean=None, num_classes=None, opt_kwargs={},
    output="", pretrained=False, resume="", sync_bn=False, train_img_sizes=None, vflip=0.0, wandb_tags=[],
)  # fmt: skip
AT_DEFAULT = dict(clip_mode="norm", dist_bn="reduce", in_chans=3, mixup_mode="batch", momentum=0.9, recount=1, tta=0)
WITHOUT_EFFECT = dict(decay_epochs=30, decay_milestones=[30, 60], kd_temperature=2.0, lr_cycle_decay=1.0)
ABOUT_SPEED = dict(channels_last=True, checkpoint_hist=1, grad_accum_steps=4, local_rank=3, pin_mem=True)
OF_A_FORK = dict(activation_tracker=False, attn_drop_rate=0.0, loadcheckpoint="")
ARGS = SET | EMPTY | AT_DEFAULT | WITHOUT_EFFECT | ABOUT_SPEED | OF_A_FORK


def load_args(folder, *words, **values):
    (folder / "args.yaml").write_text(yaml.safe_dump(values))
    return load_config("", ["-c", str(folder / "args.yaml"), *words])


def test_timms_args_yaml_is_read_and_one_line_lists_options_without_effect(tmp_path, caplog):
    expected = vars(load_args(tmp_path, **SET | dict(torchcompile=True)))
    assert not caplog.text
    assert vars(load_args(tmp_path, **ARGS)) == expected
    (said,) = caplog.messages
    named = said.rpartition(":")[2].replace(",", "").split()
    assert {*named} == {*ARGS} - {*FIELDS} | {"drop_path", "output"}


def test_unsupported_options_in_timms_args_yaml_are_listed_in_one_message(tmp_path):
    unsupported = dict(cooldown_epochs=10, clip_mode="agc", mixup_mode="pair", vflip=0.5, mean=[0.5])
    of_a_fork = dict(mesa=0.5, tag="tiny")
    wrong = dict(epochs="many", opt="adahessian", model="mamba_vision_T", input_size=[1, 224, 224], batch_size=128)
    with pytest.raises(ConfigError) as caught:
        load_args(tmp_path, **ARGS | unsupported | of_a_fork | wrong)
    named = {*re.findall(r"\w+", str(caught.value))}
    assert named >= {*unsupported, *of_a_fork, *wrong}
    assert not named & (ARGS.keys() - {*unsupported, *wrong})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(data="/a"), dict(data_dir="/a")), (dict(data="/a", data_dir="/b"), dict(data_dir="/b")),
        (dict(drop_connect=0.1, drop_path=None), dict(drop_path=0.1)),
        (dict(initial_checkpoint="a.pth"), dict(pretrained_path="a.pth")),
        (dict(pretrained=True), dict(pretrained=True)),
        (dict(img_size=None, input_size=[3, 192, 192]), dict(img_size=192)),
        (dict(input_size=[3, 192, 256], img_size=None), dict(img_size=(192, 256))),
        (dict(drop=0.1, gp="avg", model_kwargs=dict(depth=2)),
         dict(model_kwargs=dict(drop_rate=0.1, global_pool="avg", depth=2))),
        (dict(pin_mem=True, img_size=64, model_kwargs=dict(depth=2, img_size=64)),
         dict(img_size=64, model_kwargs=dict(depth=2))),
        (dict(pin_mem=True, aa=None, color_jitter=None, torchcompile=None), dict(aa=None, color_jitter=None)),
        (dict(pin_mem=True, batch_size=32, global_batch_size=96), dict(batch_size=32, global_batch_size=96)),
        (dict(lr=1e-3, lr_base=0.1, lr_base_size=512), dict(lr=1e-3)),
        (dict(sched="step", decay_epochs=90), dict(sched="step")), (dict(opt="adamw", momentum=0.5), {}),
        (dict(reprob=0.0, resplit=True), dict(reprob=0.0)),
    ],
)  # fmt: skip
def test_timms_option_names_are_translated(tmp_path, values, expected):
    assert vars(load_args(tmp_path, **values)) == vars(Config(**expected, experiment="args"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (dict(pin_mem=True, batch_size=32), "--global-batch-size"), (dict(lr=None, lr_base=0.1), "--lr"),
        (dict(sched="step", decay_epochs=30), "decay_epochs"),
        (dict(opt="sgd", momentum=0.5), "momentum"), (dict(lr_cycle_limit=2, lr_cycle_mul=2.0), "lr_cycle_mul"),
        (dict(img_size=224, input_size=[3, 192, 192]), "contradicts 'img_size'"), (dict(jsd_loss=True), "jsd_loss"),
        (dict(pin_mem=True, others={7: 1}), "others"), (dict(resplit=True), "resplit"),
        (dict(split_bn=True), "split_bn"),
    ],
)  # fmt: skip
def test_options_of_timm_with_another_meaning_are_rejected(tmp_path, values, named):
    with pytest.raises(ConfigError, match=named):
        load_args(tmp_path, **values)


def test_the_command_line_completes_timms_args_yaml(tmp_path):
    config = load_args(
        tmp_path, "--lr", "1e-3", "--global-batch-size", "512", lr=None, lr_base=0.1, batch_size=128, decay_rate=0.1
    )
    assert (config.lr, config.global_batch_size, config.batch_size) == (1e-3, 512, 128)


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("--img-size 192 256", (192, 256)), ("--img-size 192", 192), ("--img-size 192 192", 192),
        ("--input-size 3 192 256", (192, 256)), ("--input-size 3 192 192", 192), ("--img-size none", None),
        ("--phases {img_size:~[192,256]}", (192, 256)),
    ],
)  # fmt: skip
def test_an_image_size_is_a_number_or_height_and_width(words, size):
    config = load_config("", [word.replace("~", " ") for word in words.split()])
    assert config.of_phase(0).img_size == size
    assert options_of_checkpoint(dict(img_size=config.of_phase(0).img_size), "x") == dict(img_size=size)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--img-size 192 256 3", "--img-size must be an integer or a pair"),
        ("--img-size 192 0", "--img-size must be at least 1"),
        ("--img-size 192 none", "--img-size must be an integer or a pair"),
        ("--input-size 1 192 192", "'input_size' in the command line must be \\(3, height, width\\)"),
        ("--input-size 3 192 x", "--img-size must be an integer"),
    ],
)
def test_an_invalid_image_size_is_rejected(words, message):
    with pytest.raises(ConfigError, match=message):
        load_config("", words.split())


def test_each_side_of_the_image_size_of_a_checkpoint_is_bounded():
    for size in ((8193, 16), (16, 8193)):
        with pytest.raises(ConfigError, match="'img_size' .*at most 8192, got 8193"):
            options_of_checkpoint(dict(img_size=size), "x")


def test_key_value_words_are_parsed_as_yaml():
    words = ["a=1", "b=1.5", "c=[1, 2]", "d=x=y", "e=true", "f="]
    assert parse_key_values(words) == dict(a=1, b=1.5, c=[1, 2], d="x=y", e=True, f=None)


def test_the_help_names_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stopped:
        load_config("What it is for", ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    assert "What it is for" in text
    for name, field in FIELDS.items():
        assert f"--{name.replace('_', '-')}" in text
        assert " ".join(f"{field.metadata['help']} (default: {field.default})".split()) in text
    assert "--no-amp" in text


@pytest.mark.parametrize(
    ("options", "mixing"),
    [({}, True), (dict(mixup_prob=0.0), False), (dict(mixup=0.0), True), (dict(cutmix=0.0), True),
     (dict(mixup=0.0, cutmix=0.0), False), (dict(mixup=0.1, cutmix=0.0, mixup_prob=0.1), True)],
)  # fmt: skip
def test_mixing_needs_mixup_or_cutmix_and_a_positive_probability(options, mixing):
    assert Config(**options).mixing is mixing


def test_an_empty_value_for_an_optional_option_means_unset(tmp_path):
    """An empty value means unset, as in `--resume "$CHECKPOINT"` with an unset variable, or in files of timm."""
    assert load_config("", ["--resume", "", "--data-dir", "", "--interpolation", ""]) == load_config("", [])
    (tmp_path / "vil_tiny.yaml").write_text("resume: ''\ninterpolation: ''\n")
    assert load_config("", ["-c", str(tmp_path / "vil_tiny.yaml")]) == load_config("", [])
