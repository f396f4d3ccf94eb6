"""Measure the cycles of a wgmma instruction by its number of columns, alone and beside warps that use shared memory.

    python benchmarks/wgmma_trial.py
"""

import torch

from vil.kernels.cuda import launches
from vil.kernels.cuda.source import I64, Out, Source

TEXT = r"""
#include "../cuda/sm90.cuh"
constexpr int N = COLUMNS, BYTES = 128;
DEVICE void product(float (&s)[N / 2], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n" NAME "k16.f32.bf16.bf16 {" REGISTERS "}, %FIRST, %SECOND, 1, 1, 1, 0, 0;"
                 : OPERANDS : "l"(a), "l"(b));
}
extern "C" __global__ void __launch_bounds__(384, 1) cycles(PARAMETERS_cycles) {
    extern __shared__ __align__(1024) char shared[];
    unsigned base = shared_address(shared);
    for (int i = threadIdx.x; i < 48 * 1024; i += blockDim.x) ((unsigned *)shared)[i] = 0;
    show_to_products();
    __syncthreads();
    int group = threadIdx.x / 128;
    if (group >= GROUPS) {  // warps that load from shared memory meanwhile
        if (MODE == 0) return;
        unsigned v[4], sum = 0;
        float f = threadIdx.x, g = 1.5f;
        for (int i = 0; i < rounds * WORK; i++) {
            if (MODE == 1) { load_shared(v, base + (i % 64) * 1024 + threadIdx.x % 64 * 16); sum += v[0] ^ v[3]; }
            if (MODE == 2) { UNROLLED for (int j = 0; j < 8; j++) f = fmaf(f, g, 0.5f), g = fmaf(g, f, 0.25f); }
        }
        if (sum == 12345 || f == 123.f || g == 123.f) out[1000] = sum;
        return;
    }
    float s[N / 2] = {};
    unsigned long long a = matrix_of_128_byte_rows(base + group * 8192, 16), b = matrix_of_128_byte_rows(base + 32768, 16);
    begin_products();
    long long start = clock64();
    for (int i = 0; i < rounds; i++) {
        UNROLLED for (int k = 0; k < 4; k++) product(s, a + k * 2, b + k * 2);
        commit_products();
        wait_for_products<1>();
    }
    wait_for_products<0>();
    long long end = clock64();
    float sum = 0;
    UNROLLED for (int i = 0; i < N / 2; i++) sum += s[i];
    if (threadIdx.x % 128 == 0) out[blockIdx.x * 4 + group] = int(end - start) + (sum == 1.f);
}
"""


def source(N: int) -> Source:
    found = Source("block/wgmma_trial", {"cycles": dict(out=Out("int"), rounds=I64)}, only_hopper=True)
    from vil.kernels.cuda.source import SOURCES

    count = N // 2
    text = TEXT.replace('"k16', '"k16').replace("%FIRST", f"%{count}").replace("%SECOND", f"%{count + 1}")
    text = text.replace("NAME", f'"{N}"').replace("REGISTERS", '"' + ", ".join(f"%{i}" for i in range(count)) + '"')
    text = text.replace("OPERANDS", ", ".join(f'"+f"(s[{i}])' for i in range(count)))
    path = SOURCES / "block/wgmma_trial.cu"
    path.write_text(text)
    found.text  # noqa: B018
    path.unlink()
    return found


def main() -> None:
    out = torch.zeros(4096, dtype=torch.int32, device="cuda")
    rounds = 500
    for N in (192, 200, 208, 256):
        row = []
        for groups in (1, 2):
            for mode, work in ((0, 1), (1, 16), (1, 64), (2, 8)):
                if groups == 2 and N > 208 and False:
                    continue
                macros = dict(COLUMNS=N, GROUPS=groups, MODE=mode, WORK=work, CTA_BYTES=196608)
                try:
                    for _ in range(2):
                        launches.launch(SOURCE[N], "cycles", macros, 132, 384, dict(out=out, rounds=rounds), 196608)
                    torch.cuda.synchronize()
                    row.append(f"{out[:528:4].float().mean().item() / (4 * rounds) / groups:.0f}")
                except Exception as error:  # noqa: BLE001
                    row.append(repr(error)[:60])
        print(N, "cycles per wgmma (1 group alone, beside loads, beside many loads, beside fp32; then 2 groups):", *row, flush=True)


SOURCE = {N: source(N) for N in (192, 200, 208, 256)}
if __name__ == "__main__":
    main()
