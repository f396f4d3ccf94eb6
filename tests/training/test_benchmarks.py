"""The parts of the benchmarks that decide what their tables say."""

import pytest
import throughput


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
def test_a_kernel_counts_in_one_group(kernel, group):
    assert throughput.group_of(kernel) == group
