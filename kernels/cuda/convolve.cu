// The convolutions of a block with what they are next to: v = silu(conv(u)) in both directions, and the gradients.
// Compiled by NVRTC with these macros:
//   INPUT        element type of the tensors: bf16, fp16 or float
//   VECTOR       neighbouring channels that a copy moves at once, up to 16 bytes
//   TAPS         tokens that a convolution sees
//   PROJECTIONS  rows of x_proj, R + 2N
//
// B batch    L tokens    D channels. Directions: 0 reads tokens from the first to the last, 1 from the last to the first.

typedef INPUT T;
constexpr int WARPS = 4;  // of a block

// V channels of some tokens of one sequence on their way from memory, zero outside of it
template <int V, int TOKENS>
struct InFlight {
    Pack<T, V> token[TOKENS];
    // tokens t .. t + TOKENS - 1, the first of them at p
    __device__ __forceinline__ void fetch(const T *p, int stride, int t, int L) {
#pragma unroll
        for (int i = 0; i < TOKENS; i++)
            token[i] = unsigned(t + i) < unsigned(L) ? load<V>(p + i64(i) * stride) : Pack<T, V>{};
    }
};
constexpr int STEP = 4;  // tokens fetched together, while those before are worked on
static_assert(STEP > BACK);

// v_0(t) = silu(bias_0 + sum_i weight_0[i] u(t - BACK + i)), v_1(t) = silu(bias_1 + sum_i weight_1[i] u(t + BACK - i)).
// They are of the H tokens that each direction reads first.
// A thread takes V channels of a stretch of tokens, with a window on u that serves both directions.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
convolve(const T *__restrict__ u, i64 u_stride, const float *__restrict__ weights, const float *__restrict__ biases,
         T *__restrict__ v, i64 B, i64 L, i64 H, i64 D, i64 stretch) {
    constexpr int V = VECTOR < 4 ? VECTOR : 4;
    i64 stretches = (L + stretch - 1) / stretch, thread = blockIdx.x * i64(32 * WARPS) + threadIdx.x;
    i64 d = thread % (D / V) * V, b = thread / (D / V) / stretches;
    if (b >= B) return;
    int begin = thread / (D / V) % stretches * stretch, end = min(L, begin + stretch), stride = u_stride;
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    u += (b * L + begin) * stride + d;
    int end_0 = min(end, int(H)), begin_1 = L - H;
    T *v_0 = v + (b * H + begin) * D + d, *v_1 = v_0 + (B * H - begin_1) * D;

    Floats<V> window[2 * BACK + STEP];
    InFlight<V, 2 * BACK> first;
    InFlight<V, STEP> next;
    first.fetch(u - i64(BACK) * stride, stride, begin - BACK, L);
    u += i64(BACK) * stride;
    next.fetch(u, stride, begin + BACK, L);
#pragma unroll
    for (int i = 0; i < 2 * BACK; i++) window[i] = to_floats(first.token[i]);
#pragma unroll 1
    for (int t = begin; t < end; t += STEP) {
#pragma unroll
        for (int i = 0; i < STEP; i++) window[2 * BACK + i] = to_floats(next.token[i]);
        u += i64(STEP) * stride;
        next.fetch(u, stride, t + STEP + BACK, L);
#pragma unroll
        for (int i = 0; i < STEP; i++) {
            Floats<V> sum_0 = forward.bias, sum_1 = backward.bias;
#pragma unroll
            for (int c = 0; c < V; c++) {
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) {
                    sum_0.at[c] = fmaf(forward.weight[tap][c], window[i + tap].at[c], sum_0.at[c]);
                    sum_1.at[c] = fmaf(backward.weight[tap][c], window[i + 2 * BACK - tap].at[c], sum_1.at[c]);
                }
                sum_0.at[c] *= sigmoid(sum_0.at[c]);
                sum_1.at[c] *= sigmoid(sum_1.at[c]);
            }
            if (t + i < end_0) store(v_0, from_floats<T>(sum_0));
            if (t + i < end && t + i >= begin_1) store(v_1, from_floats<T>(sum_1));
            v_0 += D, v_1 += D;
        }
#pragma unroll
        for (int i = 0; i < 2 * BACK; i++) window[i] = window[i + STEP];
    }
}

// -silu'(x) / LOG2E of y = -LOG2E x: with weights in these units exp(-x) needs no product of its own, and the two factors
// cancel in du
DEVICE float scaled_slope(float y) {
    constexpr float LN2 = 1 / LOG2E;
    float s = reciprocal(1 + exp2_fast(y));
    return s * fmaf(y, fmaf(-LN2 * LN2, s, LN2 * LN2), -LN2);
}

// The gradients of the convolutions' sums, s_g(t) = dv_g(t) silu'(sum_g(t)), go into
//   du(t) = sum_i weight_0[i] s_0(t + BACK - i) + weight_1[i] s_1(t - BACK + i)
//   dweight_0[i] = sum_t s_0(t) u(t - BACK + i)    dweight_1[i] = sum_t s_1(t) u(t + BACK - i)    dbias_g = sum_t s_g(t)
// where dv is what the scan gives and dprojected @ x_proj what the projections add (16-bit inputs; others come with it).
// Both are of the H tokens that a direction reads first, and zero of the others.
// Where the window on u is at t .. t + BACK, s_0(t + BACK) and s_1(t) are known. A warp takes a ROW of channels, LANE of
// them a lane, and one stretch of tokens after another, from STEP tokens before it on, by tiles in shared memory of which
// the next is on its way. The sums of a block's warps are added before it writes its part of dfilters,
// (parts, 2, TAPS + 1, D) with the biases last.
constexpr int LANE = VECTOR < 2 ? 1 : 2, ROW = 32 * LANE, TILE = sizeof(T) == 2 ? 16 : 8;
constexpr int PITCH = ROW + 16 / sizeof(T);  // so that lanes at the same channel of different tokens hit different banks
struct Tile {
    T u[TILE][PITCH], dv[2][TILE][PITCH];
};

// dprojected @ x_proj by the tensor cores, as (16 channels, 16 projections) times (16 projections, 8 tokens): lane l has,
// of tokens l / 4 and l / 4 + 8 and of each group of 32 projections, 8 neighbours, read at once (4 where the last group is
// of 16). To the cores these are columns of two products, in another order, which is all the same as long as x_proj is
// dealt alike. Nor do they mind the order of channels, so that a lane's sums in two products side by side are of
// neighbours: 4 (l / 4) .. + 3 of 32 channels, of tokens 2 (l % 4), + 1.
constexpr int PRODUCTS = (PROJECTIONS + 15) / 16, GROUPS = (PRODUCTS + 1) / 2, SIXTEENS = ROW / 16;
struct Fragments {  // x_proj as it is dealt to lanes
    Pack<unsigned, 4> at[PRODUCTS][SIXTEENS][32];
};
DEVICE bool whole(int group) { return 2 * group + 1 < PRODUCTS; }
template <class T>
struct Product {
    Pack<T, 8> projections[GROUPS][2];
    __device__ __forceinline__ Product(const T *dprojected, int t, int L, int lane) {
        const T *from = dprojected + i64(t + lane / 4) * PROJECTIONS;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int p = group * 32 + lane % 4 * (whole(group) ? 8 : 4);
                bool valid = unsigned(t + half * 8 + lane / 4) < unsigned(L) && p < PROJECTIONS;
                Pack<T, 8> &to = projections[group][half];
                if (whole(group)) {
                    to = valid ? load<8>(from + half * 8 * PROJECTIONS + p) : Pack<T, 8>{};
                } else {
                    Pack<T, 4> four = valid ? load<4>(from + half * 8 * PROJECTIONS + p) : Pack<T, 4>{};
                    to.word[0] = four.word[0], to.word[1] = four.word[1];
                }
            }
    }
    DEVICE void deal(Fragments &to, const T *x_proj, int channels, int D) {
#pragma unroll
        for (int n = 0; n < (PRODUCTS * SIXTEENS + WARPS - 1) / WARPS; n++) {
            int i = n * 32 * WARPS + threadIdx.x, lane = i % 32, sixteen = i / 32 % SIXTEENS, k = i / (32 * SIXTEENS);
            if (k >= PRODUCTS) break;
#pragma unroll
            for (int word = 0; word < 4; word++) {
                int c = sixteen / 2 * 32 + lane / 4 * 4 + sixteen % 2 * 2 + word % 2;
                int p = k / 2 * 32 + (whole(k / 2) ? lane % 4 * 8 + k % 2 * 4 : lane % 4 * 4) + word / 2 * 2;
                T low = {}, high = {};  // PROJECTIONS is even
                if (c < channels && p < PROJECTIONS) low = x_proj[i64(p) * D + c], high = x_proj[i64(p + 1) * D + c];
                to.at[k][sixteen][lane].at[word] = low.bits | unsigned(high.bits) << 16;
            }
        }
    }
    __device__ __forceinline__ void add_to(T (*dv)[PITCH], const Fragments &x_proj, int lane) const {
        constexpr int SIDE = 2;  // products side by side, as one waits for the one before it
#pragma unroll
        for (int first = 0; first < SIXTEENS; first += SIDE) {
            T *even = &dv[lane % 4 * 2][first * 16 + lane / 4 * 4], *odd = even + PITCH;
            Floats<2> sums[SIDE][2][2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Floats<4> a = to_floats(load<4>(even + half * 8 * PITCH));
                Floats<4> b = to_floats(load<4>(odd + half * 8 * PITCH));
#pragma unroll
                for (int c = 0; c < 4; c++) sums[c / 2][half][c % 2] = {a.at[c], b.at[c]};
            }
#pragma unroll
            for (int k = 0; k < PRODUCTS; k++)
#pragma unroll
                for (int i = 0; i < SIDE; i++) {
                    Pack<unsigned, 4> x = x_proj.at[k][first + i][lane];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const unsigned *p = projections[k / 2][half].word + k % 2 * 2;
                        multiply_add(T{}, sums[i][half], x.at[0], x.at[1], x.at[2], x.at[3], p[0], p[1]);
                    }
                }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Floats<4> a, b;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    Floats<2> sum = sums[c / 2][half][c % 2];
                    a.at[c] = sum.at[0], b.at[c] = sum.at[1];
                }
                store(even + half * 8 * PITCH, from_floats<T>(a));
                store(odd + half * 8 * PITCH, from_floats<T>(b));
            }
        }
    }
};
template <>
struct Product<float> {  // none: dv comes with it
    __device__ Product(const float *, int, int, int) {}
    DEVICE void deal(Fragments &, const float *, int, int) {}
    __device__ void add_to(float (*)[PITCH], const Fragments &, int) const {}
};

// three blocks a multiprocessor where registers and shared memory suffice
constexpr bool FEW = sizeof(T) == 2 && GROUPS <= 2;
extern "C" __global__ void __launch_bounds__(32 * WARPS, FEW && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200 ? 3 : 2)
convolve_backward(const T *__restrict__ u, i64 u_stride, const T *__restrict__ dv, const T *__restrict__ dprojected,
                  const T *__restrict__ x_proj, const float *__restrict__ weights, const float *__restrict__ biases,
                  T *__restrict__ du, i64 du_stride, float *__restrict__ dfilters, i64 B, i64 L, i64 H, i64 D,
                  i64 stretch, i64 parts) {
    extern __shared__ __align__(16) char shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tile *tiles = reinterpret_cast<Tile *>(shared) + warp * 2;
    Fragments *shared_x_proj = reinterpret_cast<Fragments *>(shared + WARPS * 2 * sizeof(Tile));
    i64 blocks = (D + ROW - 1) / ROW, part = blockIdx.x / blocks;
    i64 first_d = blockIdx.x % blocks * ROW, d = first_d + lane * LANE;
    bool valid = d < D;
#pragma unroll
    for (int g = 0; g < 2; g++)
        Product<T>::deal(shared_x_proj[g], x_proj + g * PROJECTIONS * D + first_d, min(D - first_d, i64(ROW)), D);
    __syncthreads();
    i64 loaded_d = min(d, D - LANE);
    int stretches = (L + stretch - 1) / stretch, items = B * stretches, length = L, read = H, unread = L - H;
    Filter<LANE> forward(weights, biases, loaded_d), backward(weights + D * TAPS, biases + D, loaded_d);
    forward.scale(-LOG2E), backward.scale(-LOG2E);
    Floats<LANE> dforward[TAPS + 1] = {}, dbackward[TAPS + 1] = {};
#pragma unroll 1
    for (int item = part * WARPS + warp; item < items; item += int(parts) * WARPS) {
        i64 b = item / stretches;
        int begin = item % stretches * int(stretch), end = min(int(L), begin + int(stretch)), t = begin - STEP;
        int stored = valid ? end : 0;
        constexpr int LANES = ROW / VECTOR;  // that copy a token
        int c = lane % LANES * VECTOR;
        const T *us = u + b * L * u_stride + first_d, *dv_0 = dv + b * H * D + first_d, *dv_1 = dv_0 + B * H * D;
        const T *dprojected_0 = dprojected + b * H * PROJECTIONS, *dprojected_1 = dprojected_0 + B * H * PROJECTIONS;
        T *dus = du + (b * L + t) * du_stride + d;
        auto copy = [&](T (*to)[PITCH], const T *from, i64 stride, int t, int tokens) {
            int bytes = stride * sizeof(T), copied = first_d + c < D ? tokens : 0;
#pragma unroll
            for (int row = lane / LANES; row < TILE; row += 32 / LANES)
                copy_async<VECTOR>(&to[row][c], (const T *)((const char *)(from + c) + i64(t + row) * bytes),
                                   unsigned(t + row) < unsigned(copied));
        };
        auto fetch = [&](Tile &tile, int t) {
            copy(tile.u, us, u_stride, t + BACK, length);
            copy(tile.dv[0], dv_0, D, t + BACK, read);
            copy(tile.dv[1], dv_1, D, t - unread, read);
            commit_copies();
        };
        __syncwarp();
        fetch(tiles[0], t);
        InFlight<LANE, BACK> first;
        first.fetch(us + t * u_stride + loaded_d - first_d, u_stride, t, L);
        // of the tokens behind t: u; what s_0 and s_1 were
        Floats<LANE> window[BACK + STEP], s_0[BACK + STEP] = {}, s_1[BACK + STEP] = {};
#pragma unroll
        for (int i = 0; i < BACK; i++) window[i] = to_floats(first.token[i]);
        // what products need of dprojected is read when those before have been added
        Product<T> product_0(dprojected_0, t + BACK, H, lane), product_1(dprojected_1, t - unread, H, lane);
#pragma unroll 1
        for (int present = 0; t < end; present ^= 1) {
            Tile &tile = tiles[present];
            wait_for_copies<0>();
            __syncwarp();
            fetch(tiles[present ^ 1], t + TILE);
            product_1.add_to(tile.dv[1], shared_x_proj[1], lane);
            product_0.add_to(tile.dv[0], shared_x_proj[0], lane);
            product_1 = Product<T>(dprojected_1, t + TILE - unread, H, lane);
            product_0 = Product<T>(dprojected_0, t + TILE + BACK, H, lane);
            __syncwarp();
#pragma unroll 1
            for (int row = 0; row < TILE && t < end; row += STEP, t += STEP) {
                float own = t >= begin;
                Pack<T, LANE> found[STEP];
#pragma unroll
                for (int i = 0; i < STEP; i++) {
                    window[BACK + i] = to_floats(load<LANE>(&tile.u[row + i][lane * LANE]));
                    s_0[BACK + i] = to_floats(load<LANE>(&tile.dv[0][row + i][lane * LANE]));
                    s_1[BACK + i] = to_floats(load<LANE>(&tile.dv[1][row + i][lane * LANE]));
                }
#pragma unroll
                for (int i = 0; i < STEP; i++) {
                    Floats<LANE> sum;
#pragma unroll
                    for (int c = 0; c < LANE; c++) {
                        float sum_0 = forward.bias.at[c], sum_1 = backward.bias.at[c];
#pragma unroll
                        for (int tap = 0; tap < TAPS; tap++) {
                            sum_0 = fmaf(forward.weight[tap][c], window[i + tap].at[c], sum_0);
                            sum_1 = fmaf(backward.weight[tap][c], window[i + BACK - tap].at[c], sum_1);
                        }
                        s_0[BACK + i].at[c] *= scaled_slope(sum_0);
                        s_1[BACK + i].at[c] *= scaled_slope(sum_1);
                        float own_u = own * window[i].at[c];
                        sum.at[c] = 0;
#pragma unroll
                        for (int tap = 0; tap < TAPS; tap++) {
                            float after = s_0[i + BACK - tap].at[c], before = s_1[i + tap].at[c];
                            dforward[tap].at[c] = fmaf(own_u, after, dforward[tap].at[c]);
                            dbackward[tap].at[c] = fmaf(own_u, before, dbackward[tap].at[c]);
                            sum.at[c] = fmaf(forward.weight[tap][c], after, sum.at[c]);
                            sum.at[c] = fmaf(backward.weight[tap][c], before, sum.at[c]);
                        }
                        dforward[TAPS].at[c] = fmaf(own, s_0[i].at[c], dforward[TAPS].at[c]);
                        dbackward[TAPS].at[c] = fmaf(own, s_1[BACK + i].at[c], dbackward[TAPS].at[c]);
                    }
                    found[i] = from_floats<T>(sum);
                }
#pragma unroll
                for (int i = 0; i < STEP; i++)
                    if (t >= begin && t + i < stored) store(dus + i * du_stride, found[i]);
                dus += STEP * du_stride;
#pragma unroll
                for (int i = 0; i < BACK; i++)
                    window[i] = window[i + STEP], s_0[i] = s_0[i + STEP], s_1[i] = s_1[i + STEP];
            }
        }
        wait_for_copies<0>();  // of a tile that nobody needs
    }
    auto sums = reinterpret_cast<Floats<LANE> (*)[2 * (TAPS + 1)][32]>(shared);
    __syncthreads();
#pragma unroll
    for (int tap = 0; tap <= TAPS; tap++) {
#pragma unroll
        for (int c = 0; c < LANE; c++) dforward[tap].at[c] *= -LOG2E, dbackward[tap].at[c] *= -LOG2E;
        sums[warp][tap][lane] = dforward[tap];
        sums[warp][TAPS + 1 + tap][lane] = dbackward[tap];
    }
    __syncthreads();
    if (!valid) return;
    for (int row = warp; row < 2 * (TAPS + 1); row += WARPS) {
        Floats<LANE> sum = sums[0][row][lane];
#pragma unroll
        for (int w = 1; w < WARPS; w++)
#pragma unroll
            for (int c = 0; c < LANE; c++) sum.at[c] += sums[w][row][lane].at[c];
        store(dfilters + (part * 2 * (TAPS + 1) + row) * D + d, sum);
    }
}

