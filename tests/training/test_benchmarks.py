"""Tests of the FLOPs, training hours and throughput that the benchmarks report."""

import flops
import hours
import pytest
import throughput
from processes import call


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("scan_backward", "scan backward"),
        ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("conv_xproj", "convolution"),
        ("step_proj_backward", "matrix products"),
        ("gate_outproj", "norm, gate"),
        ("segment_gradients", "scan segments"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "other"),
    ],
)
def test_each_kernel_belongs_to_one_group(kernel, group):
    assert throughput.group_of(kernel) == group


def test_flops_of_timms_models_equal_timms_published_flops():
    assert [f"{value:.1f}" for value in flops.measure("resnet18", 224)] == ["11.7", "3.6", "3.6", "2.5"]


def test_gpu_hours_sum_over_epochs_phases_and_gpus(tmp_path, monkeypatch, capsys):
    (tmp_path / "plain.yaml").write_text("epochs: 300\nglobal_batch_size: 1000\n")
    (tmp_path / "phases.yaml").write_text(
        "phases: [{epochs: 100, img_size: 128}, {epochs: 10}]\nglobal_batch_size: 1\n"
    )
    speeds = iter([(1281.0, 50_000.0), (12_811.67, 1e9), (1281.167, 500.0)])
    monkeypatch.setattr(hours, "measure", lambda *_: next(speeds))
    call(hours.main, *(tmp_path / name for name in ("plain.yaml", "phases.yaml")), "--gpus", 2)
    found = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    plain, first, second = 2 * 300 * (1000 + 1) / 3600, 2 * 100 * 100 / 3600, 2 * 10 * (1000 + 100) / 3600
    assert [line[6] for line in found if line[1] != "all"] == [f"{value:.1f}" for value in (plain, first, second)]
    share = (first + second) / plain
    assert found[1][-3:] == [f"{plain:.1f}", "1.00", "1.00"]
    assert found[-1][-3:] == [f"{first + second:.1f}", f"{share:.2f}", f"{share * 300 / 110:.2f}"]
