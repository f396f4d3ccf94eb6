// racecheck.py compiles this: two warps write slots of shared memory, two others read what another thread wrote. Its
// PATTERNS define PRODUCE, WAIT and DONE, by which they wait for each other; RACY reads a slot before it waits.

constexpr int PRODUCERS = 64, THREADS = 128, WORDS = 256;
DEVICE unsigned address(const void *p) { return __cvta_generic_to_shared(p); }
DEVICE void named_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
typedef unsigned long long Barrier;
struct Slots {
    alignas(128) int at[SLOTS][WORDS];
    Barrier full[SLOTS], empty[SLOTS];
};
#define FULL address(&slots.full[i % SLOTS])
#define EMPTY address(&slots.empty[i % SLOTS])
#define PHASE (i / SLOTS % 2)

extern "C" __global__ void __launch_bounds__(THREADS) pipeline(const int *in, unsigned *out) {
    extern __shared__ __align__(128) char shared[];
    Slots &slots = *reinterpret_cast<Slots *>(shared);
    int thread = threadIdx.x, lane = thread % 32;
    unsigned sum = 0;
#if MBARRIERS
    if (thread == 0)
        for (int i = 0; i < SLOTS; i++) init_barrier(FULL, FULL_COUNT), init_barrier(EMPTY, EVERY_LANE ? 64 : 2);
    __syncthreads();
#endif
    // 16 bytes of a slot are a producer's
    auto fill = [&](int i) {
        *reinterpret_cast<int4 *>(&slots.at[i % SLOTS][4 * thread]) =
            *reinterpret_cast<const int4 *>(in + i * WORDS + 4 * thread);
    };
    auto start_copy = [&](int i) {
        if (i < STEPS) copy_async<4>(&slots.at[i % SLOTS][4 * thread], in + i * WORDS + 4 * thread, true);
        commit_copies();
    };
    auto start_bulk_copy = [&](int i) {
        show_to_products();  // what was read before is what the copy overwrites
        arrive_and_expect(FULL, WORDS * 4);
        copy_bulk(address(slots.at[i % SLOTS]), in + i * WORDS, WORDS * 4, FULL);
    };
    // a consumer takes what another thread wrote
    auto word = [&](int i, int w) {
        return unsigned(*const_cast<volatile int *>(&slots.at[i % SLOTS][(thread + 33) % 64 * 4 + w]));
    };
    auto read = [&](int i) { sum += (i + 1) * (word(i, 0) + word(i, 1) + word(i, 2) + word(i, 3)); };
    auto give_back = [&](int i) {
        __syncwarp();
        if (EVERY_LANE || lane == 0) arrive(EMPTY);
    };
#if !LIKE_SCAN
    if (thread < PRODUCERS) {
        BEFORE
#pragma unroll 1
        for (int i = 0; i < STEPS; i++) { PRODUCE }
    } else {
#pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            if (RACY) read(i);
            WAIT
            if (!RACY) read(i);
            DONE
        }
    }
#else  // one producer is a step ahead and meets the others' barrier at the start of its loop, the other at its end, and
       // consumers amid theirs; before that the producers meet at barriers of their own
    if (thread < PRODUCERS / 2) {
        named_sync(1, PRODUCERS);
        fill(0);
        named_sync(1, PRODUCERS);
#pragma unroll 1
        for (int i = 1; i <= STEPS; i++) {
            __syncthreads();
            if (i < STEPS) fill(i);
        }
        __syncthreads();
    } else if (thread < PRODUCERS) {
        named_sync(1, PRODUCERS);
        named_sync(1, PRODUCERS);
#pragma unroll 1
        for (int i = 0;; i++) {
            if (i < STEPS) fill(i);
            __syncthreads();
            if (i == STEPS) break;
        }
    } else {
        __syncthreads();
        unsigned first = word(0, 0);
#pragma unroll 1
        for (int i = 0; i + 1 < STEPS; i++) {
            sum += (i + 1) * (first + word(i, 1) + word(i, 2) + word(i, 3));
            if (RACY) first = word(i + 1, 0);
            __syncthreads();
            if (!RACY) first = word(i + 1, 0);
        }
        sum += STEPS * (first + word(STEPS - 1, 1) + word(STEPS - 1, 2) + word(STEPS - 1, 3));
        __syncthreads();
    }
#endif
    if (thread >= PRODUCERS) out[blockIdx.x * PRODUCERS + thread - PRODUCERS] = sum;
}
