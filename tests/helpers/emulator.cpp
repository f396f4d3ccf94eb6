// CPU emulation of the CUDA features that the kernels use. Each thread of a block is a fiber that runs until it waits at a
// barrier. Blocks and threads run in random order, and some warps run ahead of others. Asynchronous copies and products
// complete only when a thread waits for them, and shared memory starts as NaN, so a missing barrier or wait changes the
// result. Operations that a GPU would reject, such as a misaligned load, end the launch with a message, and so does an
// access of unreadable memory, which emulator.py places behind tensors.
// emulator.py inserts the kernels in the middle of this file and lists the kernels in ENTRIES.
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __builtin_assume(...)
#define threadIdx (current->index)

namespace emulator {
struct Index { unsigned x; };
struct Copy { char *to; const char *from; int bytes; bool valid; };
struct Fragments { unsigned word[6]; };  // operands of a tensor-core product: a_0 .. a_3, b_0, b_1
struct Product {  // warpgroup product; registers and shared memory are read on completion, not on issue
    void (*run)(const Product &);
    float *sums;
    const unsigned *a;
    unsigned a_shared, b, apart;
    bool add;
};
enum State { READY, AT_WARP, AT_SOME, AT_BLOCK, DONE };
struct Thread {
    jmp_buf context;
    char *stack;
    State state;
    Index index;
    unsigned waiting_for;  // number of threads at a named barrier, which a part of the block shares
    float passed;
    Fragments fragments;
    float values[12];  // unpacked 16-bit elements of `fragments`
    const void *row;  // row of the matrix that load_rows reads
    std::vector<Copy> open;
    std::deque<std::vector<Copy>> committed;
    std::vector<Product> open_products;
    std::deque<std::vector<Product>> committed_products;
};
std::vector<Thread> threads;
jmp_buf scheduler, failed;
const char *failure;
constexpr int STACK = 1 << 18;
// Switch fibers without the system call that swapcontext makes.
static void change(jmp_buf &from, jmp_buf &to) {
    if (!_setjmp(from)) _longjmp(to, 1);
}
[[noreturn]] static void fail(const char *why) {
    failure = why;
    _longjmp(failed, 1);
}
static void check_aligned(const void *p, size_t bytes) {
    if (size_t(p) % bytes) fail("misaligned address");
}
static void land(const std::vector<Copy> &copies) {
    for (auto &c : copies) c.valid ? memcpy(c.to, c.from, c.bytes) : memset(c.to, 0, c.bytes);
}
unsigned blocks_run;
// Fill a __shared__ variable with NaN at the start of every block.
template <class T>
static void begin_as_nan(T &variable, unsigned &block) {
    if (block != blocks_run) memset((void *)&variable, 0xff, sizeof variable), block = blocks_run;
}
}  // namespace emulator

static emulator::Index blockIdx, blockDim, gridDim;
static emulator::Thread *current;
static char *shared_memory;

static void wait_at(emulator::State barrier) {
    current->state = barrier;
    emulator::change(current->context, emulator::scheduler);
}
static void __syncwarp() { wait_at(emulator::AT_WARP); }
static void wait_for_some(unsigned threads) {
    current->waiting_for = threads;
    wait_at(emulator::AT_SOME);
}
static void __syncthreads() { wait_at(emulator::AT_BLOCK); }
static float __shfl_sync(unsigned, float v, int lane) {
    current->passed = v;
    __syncwarp();
    float other = emulator::threads[threadIdx.x / 32 * 32 + lane].passed;
    __syncwarp();
    return other;
}
static unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    unsigned long long bytes = low | (unsigned long long)high << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
static double __hiloint2double(int high, int low) {
    unsigned long long bits = (unsigned long long)high << 32 | unsigned(low);
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <class V>
static V __shfl_xor_sync(unsigned, V v, int distance) {
    static_assert(sizeof v == sizeof current->passed);
    memcpy(&current->passed, &v, sizeof v);
    __syncwarp();
    V other;
    memcpy(&other, &emulator::threads[threadIdx.x ^ distance].passed, sizeof other);
    __syncwarp();
    return other;
}
static unsigned __ballot_sync(unsigned, bool v) {
    current->passed = v;
    __syncwarp();
    unsigned lanes = 0;
    for (int lane = 0; lane < 32; lane++) lanes |= (emulator::threads[threadIdx.x / 32 * 32 + lane].passed != 0) << lane;
    __syncwarp();
    return lanes;
}
static bool __any_sync(unsigned all, bool v) { return __ballot_sync(all, v) != 0; }
template <class T>
static void atomicAdd(T *sum, T v) { *sum += v; }
static void start_copy(void *to, const void *from, int bytes, bool valid) {
    emulator::check_aligned(to, bytes);
    if (valid) emulator::check_aligned(from, bytes);
    current->open.push_back({(char *)to, (const char *)from, bytes, valid});
}
static void commit_started() {
    current->committed.push_back(current->open);
    current->open.clear();
}
static void wait_until(int pending) {
    while (int(current->committed.size()) > pending) {
        emulator::land(current->committed.front());
        current->committed.pop_front();
    }
}

template <class A, class B>
static auto min(A a, B b) {
    typedef std::common_type_t<A, B> C;
    return C(a) < C(b) ? C(a) : C(b);
}
template <class A, class B>
static auto max(A a, B b) {
    typedef std::common_type_t<A, B> C;
    return C(a) > C(b) ? C(a) : C(b);
}
template <class To, class From>
static To bits_of(From v) {
    static_assert(sizeof(To) == sizeof(From));
    To bits;
    memcpy(&bits, &v, sizeof v);
    return bits;
}
static float __uint_as_float(unsigned bits) { return bits_of<float>(bits); }
static unsigned __float_as_uint(float v) { return bits_of<unsigned>(v); }
static unsigned to_bf16(float f) {
    unsigned bits = bits_of<unsigned>(f);
    return f != f ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float sinpif(float x) { return sin(M_PI * x); }
static float cospif(float x) { return cos(M_PI * x); }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static unsigned to_fp16(float f) { return bits_of<unsigned short>(_Float16(f)); }
static float from_fp16(unsigned bits) {  // uses a table, because many CPUs lack an instruction
    static std::vector<float> values;
    if (values.empty())
        for (int i = 0; i < 1 << 16; i++) values.push_back(bits_of<_Float16>((unsigned short)i));
    return values[bits];
}
static void multiply_fragments(float (*value)(unsigned), float *sums, emulator::Fragments fragments) {
    for (int i = 0; i < 12; i++) {
        unsigned word = fragments.word[i / 2];
        current->values[i] = value(i % 2 ? word >> 16 : word & 0xffff);
    }
    __syncwarp();
    emulator::Thread *warp = &emulator::threads[threadIdx.x / 32 * 32];
    float a[2][16], b[2][16];  // two rows of A and two columns of B
    int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++) {
            a[i][k] = warp[row * 4 + k % 8 / 2].values[(k / 8 * 2 + i) * 2 + k % 2];
            b[i][k] = warp[(column + i) * 4 + k % 8 / 2].values[8 + k / 8 * 2 + k % 2];
        }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) sums[i] += a[i / 2][k] * b[i % 2][k];
    __syncwarp();
}
// Emulate ldmatrix: load 8 x 8 matrices of 16-bit elements. Lanes 8 i to 8 i + 7 hold the row addresses of matrix i.
static void load_rows(unsigned *matrices, int count, const void *row, bool transposed) {
    emulator::check_aligned(row, 16);
    current->row = row;
    __syncwarp();
    for (int i = 0; i < count; i++) {
        auto element = [&](int row, int column) -> unsigned {
            return ((const unsigned short *)emulator::threads[threadIdx.x / 32 * 32 + i * 8 + row].row)[column];
        };
        int c = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
        matrices[i] = transposed ? element(p, c) | element(p + 1, c) << 16 : element(c, p) | element(c, p + 1) << 16;
    }
    __syncwarp();
}
// Emulate movmatrix: transpose an 8 x 8 matrix of 16-bit elements that is held in registers.
static unsigned transpose_rows(unsigned m) {
    current->fragments.word[0] = m;
    __syncwarp();
    auto element = [&](int row, int column) -> unsigned {
        return emulator::threads[threadIdx.x / 32 * 32 + row * 4 + column / 2].fragments.word[0] >> column % 2 * 16 & 0xffff;
    };
    int c = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
    unsigned transposed = element(p, c) | element(p + 1, c) << 16;
    __syncwarp();
    return transposed;
}

// Emulation of sm90.cuh. Addresses are offsets from the start of shared memory.
namespace emulator {
struct Barrier { short count, left; int bytes : 31; unsigned phase : 1; };
// Pending copies that may complete at any time and then arrive at a barrier, by thread count or by bytes.
struct Flight {
    const Thread *owner;
    std::vector<Copy> copies;
    unsigned barrier;
    int bytes;
};
std::vector<Flight> flights;
}
static unsigned shared_address(const void *p) { return (const char *)p - shared_memory; }
static emulator::Barrier &barrier_at(unsigned address) { return *(emulator::Barrier *)(shared_memory + address); }
static void finish_phase(emulator::Barrier &b) {
    if (b.left == 0 && b.bytes == 0) b.left = b.count, b.phase ^= 1;
}
static void init_barrier(unsigned barrier, short count) { barrier_at(barrier) = {count, count, 0, 0}; }
static void publish_barriers() {}
static void arrive(unsigned barrier) {
    barrier_at(barrier).left--;
    finish_phase(barrier_at(barrier));
}
static void arrive_and_expect(unsigned barrier, int bytes) {
    barrier_at(barrier).bytes += bytes;
    arrive(barrier);
}
namespace emulator {
// Complete the pending copies that `which` selects.
template <class Which>
static void land_flights(Which which) {
    for (size_t i = 0; i < flights.size();) {
        if (!which(flights[i])) {
            i++;
            continue;
        }
        Flight flight = flights[i];
        flights.erase(flights.begin() + i);
        land(flight.copies);
        if (flight.bytes) {
            barrier_at(flight.barrier).bytes -= flight.bytes;
            finish_phase(barrier_at(flight.barrier));
        } else {
            arrive(flight.barrier);
        }
    }
}
}
static void wait_for(unsigned barrier, unsigned phase) {
    for (int turns = 0; barrier_at(barrier).phase == phase; turns++) {
        if (turns > 1000000) emulator::fail("nobody arrives at a barrier");
        wait_at(emulator::READY);
    }
}
static void wait_long_for(unsigned barrier, unsigned phase) { wait_for(barrier, phase); }
static void copy_16_async(unsigned to, const void *from) { start_copy(shared_memory + to, from, 16, true); }
static void prefetch_to_l2(const void *) {}
static void wait_for_all_copies() {
    commit_started();
    wait_until(0);
    emulator::land_flights([](auto &flight) { return flight.owner == current; });
}
static void arrive_when_copied(unsigned barrier) {
    emulator::flights.push_back({current, current->open, barrier, 0});
    current->open.clear();
}
static void copy_bulk(unsigned to, const void *from, int bytes, unsigned barrier) {
    emulator::check_aligned(shared_memory + to, 16);
    emulator::check_aligned(from, 16);
    if (bytes % 16) emulator::fail("a bulk copy of parts of 16 bytes");
    emulator::flights.push_back({nullptr, {{shared_memory + to, (const char *)from, bytes, true}}, barrier, bytes});
}
template <int REGISTERS> static void take_registers() {}
template <int REGISTERS> static void give_registers() {}
static void load_matrices(unsigned (&m)[4], unsigned row) { load_rows(m, 4, shared_memory + row, false); }
static void load_shared(unsigned (&v)[4], unsigned from) {
    emulator::check_aligned(shared_memory + from, 16);
    memcpy(v, shared_memory + from, 16);
}
static void store_shared(unsigned to, unsigned v) { memcpy(shared_memory + to, &v, 4); }
static void store_shared(unsigned to, const unsigned (&v)[4]) {
    emulator::check_aligned(shared_memory + to, 16);
    memcpy(shared_memory + to, v, 16);
}
// Emulate stmatrix: store transposed 8 x 8 matrices. Lanes 8 i to 8 i + 7 hold the addresses of the columns of matrix i.
static void store_columns(unsigned to, const unsigned *matrices, int count) {
    for (int i = 0; i < count; i++) current->fragments.word[i] = matrices[i];
    __syncwarp();
    int lane = threadIdx.x % 32, column = lane % 8;
    if (lane / 8 < count) {
        emulator::check_aligned(shared_memory + to, 16);
        for (int row = 0; row < 8; row++) {
            auto &of_row = emulator::threads[threadIdx.x / 32 * 32 + row * 4 + column / 2].fragments;
            unsigned short element = of_row.word[lane / 8] >> column % 2 * 16;
            memcpy(shared_memory + to + row * 2, &element, 2);
        }
    }
    __syncwarp();
}
static void store_transposed(unsigned to, unsigned a, unsigned b) {
    const unsigned matrices[] = {a, b};
    store_columns(to, matrices, 2);
}
static void store_transposed(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
    const unsigned matrices[] = {a, b, c, d};
    store_columns(to, matrices, 4);
}
static void store_unless_negative(int index, void *to, unsigned first, unsigned second) {
    if (index < 0) return;
    emulator::check_aligned(to, 8);
    memcpy(to, &first, 4), memcpy((char *)to + 4, &second, 4);
}
namespace emulator {
template <class T>
static float shared_value(unsigned address) {
    unsigned short bits;
    memcpy(&bits, shared_memory + address, 2);
    return unpack(T{}, unsigned(bits)).at[0];
}
}
template <class T>
static void run_group(const emulator::Product &product) {
    for (int i = 0; i < 8; i++) current->values[i] = unpack(T{}, product.a[i / 2]).at[i % 2];
    __syncwarp();
    emulator::Thread *row = &emulator::threads[threadIdx.x / 4 * 4];  // the warp has this row and the row 8 below
    for (int j = 0; j < 48; j++) {
        unsigned column = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2, address = product.b + column * 64;
        float b[16];
        for (int k = 0; k < 16; k++)
            b[k] = emulator::shared_value<T>(address + k * 2 ^ (address + k * 2 >> 7 & 3) << 4);
        for (int half = 0; half < 2; half++) {
            float &to = product.sums[j / 2 * 4 + half * 2 + j % 2], sum = product.add ? to : 0;
            for (int k = 0; k < 16; k++) sum += row[k % 8 / 2].values[k / 8 * 4 + half * 2 + k % 2] * b[k];
            to = sum;
        }
    }
    __syncwarp();
}
template <class T>
static void multiply_group(T, float (&sums)[96], const unsigned (&a)[4], unsigned b, bool add) {
    current->open_products.push_back({run_group<T>, sums, a, 0, b, 0, add});
}
static void begin_products() {}
static void commit_products() {
    current->committed_products.push_back(current->open_products);
    current->open_products.clear();
}
template <int PENDING>
static void wait_for_products() {
    while (int(current->committed_products.size()) > PENDING) {
        for (auto &product : current->committed_products.front()) product.run(product);
        current->committed_products.pop_front();
    }
    __syncwarp();
}
template <int N> static void hold(float (&)[N]) {}
template <class T>
static void run_shared(const emulator::Product &product) {
    auto value = [](unsigned address) { return emulator::shared_value<T>(address ^ (address >> 7 & 7) << 4); };
    float a[2][16];
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int i = 0; i < 32; i++) a[i / 16][i % 16] = value(product.a_shared + (row + i / 16 * 8) * 128 + i % 16 * 2);
    for (int j = 0; j < 32; j++) {
        int column = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
        float b[16];
        for (int k = 0; k < 16; k++)
            b[k] = value(product.b + column / 64 * product.apart + k * 128 + column % 64 * 2);
        for (int half = 0; half < 2; half++) {
            float &to = product.sums[j / 2 * 4 + half * 2 + j % 2], sum = product.add ? to : 0;
            for (int k = 0; k < 16; k++) sum += a[half][k] * b[k];
            to = sum;
        }
    }
}
template <class T>
static void multiply_shared(T, float (&sums)[64], unsigned a, unsigned b, int apart, bool add) {
    current->open_products.push_back({run_shared<T>, sums, nullptr, a, b, unsigned(apart), add});
}
template <class T>
static void run_slot(const emulator::Product &product) {
    auto value = [](unsigned address) { return emulator::shared_value<T>(address ^ (address >> 7 & 7) << 4); };
    float a[2][16];
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int i = 0; i < 32; i++) a[i / 16][i % 16] = value(product.a_shared + (row + i / 16 * 8) * 128 + i % 16 * 2);
    for (int j = 0; j < 48; j++) {
        unsigned column = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2, address = product.b + column * 64;
        float b[16];
        for (int k = 0; k < 16; k++)
            b[k] = emulator::shared_value<T>(address + k * 2 ^ (address + k * 2 >> 7 & 3) << 4);
        for (int half = 0; half < 2; half++) {
            float &to = product.sums[j / 2 * 4 + half * 2 + j % 2], sum = product.add ? to : 0;
            for (int k = 0; k < 16; k++) sum += a[half][k] * b[k];
            to = sum;
        }
    }
}
template <class T>
static void multiply_slot(T, float (&sums)[96], unsigned a, unsigned b, bool add) {
    current->open_products.push_back({run_slot<T>, sums, nullptr, a, b, 0, add});
}
struct SharedRows {
    unsigned address;
    SharedRows(unsigned address) : address(address) {}
    SharedRows after(int bytes) const { return address + bytes; }
};
template <class T>
static void run_rows(const emulator::Product &product) {
    auto value = [](unsigned address) { return emulator::shared_value<T>(address ^ (address >> 7 & 7) << 4); };
    float a[2][16];
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    for (int i = 0; i < 32; i++) a[i / 16][i % 16] = value(product.a_shared + (row + i / 16 * 8) * 128 + i % 16 * 2);
    for (int j = 0; j < 50; j++) {
        int column = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
        float b[16];
        for (int k = 0; k < 16; k++) b[k] = value(product.b + column * 128 + k * 2);
        for (int half = 0; half < 2; half++) {
            float &to = product.sums[j / 2 * 4 + half * 2 + j % 2], sum = product.add ? to : 0;
            for (int k = 0; k < 16; k++) sum += a[half][k] * b[k];
            to = sum;
        }
    }
}
template <class T>
static void multiply_rows(T, float (&sums)[100], SharedRows a, SharedRows b, bool add) {
    current->open_products.push_back({run_rows<T>, sums, nullptr, a.address, b.address, 0, add});
}
static void show_to_products() {}

/* KERNELS */

namespace emulator {
i64 arguments[64];
int entry;

template <class P>
P argument(i64 v) {
    if constexpr (std::is_pointer_v<P>)
        return (P)v;
    else if constexpr (std::is_floating_point_v<P>)
        return bits_of<P>(v);
    else
        return v;
}
template <class... P, size_t... I>
void call(void (*kernel)(P...), std::index_sequence<I...>) {
    kernel(argument<P>(arguments[I])...);
}
template <class... P>
void call(void (*kernel)(P...)) {
    call(kernel, std::index_sequence_for<P...>());
}
void run_thread() {
    for (;;) {
        change(current->context, scheduler);
        int i = 0;
#define ENTRY(kernel) if (i++ == entry) call(kernel);
        ENTRIES
        current->state = DONE;
    }
}
// Start a fiber that all blocks reuse.
void start_thread(Thread &t) {
    t.stack = (char *)malloc(STACK);
    ucontext_t context, here;
    getcontext(&context);
    context.uc_stack.ss_sp = t.stack;
    context.uc_stack.ss_size = STACK;
    makecontext(&context, run_thread, 0);
    current = &t;
    if (!_setjmp(scheduler)) swapcontext(&here, &context);
}

void run_block() {
    unsigned block = threads.size();
    for (unsigned i = 0; i < block; i++) {
        Thread &t = threads[i];
        t.state = READY;
        t.index.x = i;
        t.open.clear();
        t.committed.clear();
        t.open_products.clear();
        t.committed_products.clear();
    }
    flights.clear();
    unsigned awake = ~0u;  // bit mask of the warps that may run
    for (int late = 0;;) {  // maximum number of turns until the sleeping warps wake
        bool progress = false;
        if (late-- <= 0 && rand() % 16 == 0) awake = rand();
        land_flights([](auto &) { return rand() % 4 == 0; });
        unsigned start = rand() % block, step = rand() % 2 ? 1 : block - 1, done = 0, waiting = 0;
        for (unsigned k = 0; k < block; k++) {
            current = &threads[(start + k * step) % block];
            if (current->state != READY || !(awake >> threadIdx.x / 32 & 1)) continue;
            change(scheduler, current->context);
            progress = true;
        }
        for (unsigned first = 0; first < block; first += 32) {
            unsigned there = 0;
            for (unsigned i = first; i < first + 32; i++) there += threads[i].state == AT_WARP;
            if (there < 32) continue;
            for (unsigned i = first; i < first + 32; i++) threads[i].state = READY;
            progress = true;
        }
        unsigned some = 0, expected = 0;
        for (auto &t : threads)
            if (t.state == AT_SOME) some++, expected = t.waiting_for;
        if (some && some == expected) {
            for (auto &t : threads)
                if (t.state == AT_SOME) t.state = READY;
            progress = true;
        }
        for (auto &t : threads) done += t.state == DONE, waiting += t.state == AT_BLOCK;
        if (done == block && flights.size()) fail("a block ends with copies on their way to it");
        if (done == block) return;
        if (waiting && waiting + done == block) {
            for (auto &t : threads)
                if (t.state == AT_BLOCK) t.state = READY;
            progress = true;
            if (rand() % 4 == 0) awake = rand(), late = 200;
        }
        if (!progress && awake == ~0u) fail("threads wait at different barriers");
        if (!progress) awake = ~0u, late = 0;
    }
}
}  // namespace emulator

// Run blocks `first` to `grid - 1` of the grid; return the failure message, or null.
extern "C" const char *launch(int entry, const i64 *arguments, int count, unsigned first, unsigned grid, unsigned block,
                              i64 shared_bytes) {
    constexpr i64 GUARD = 1 << 14;  // bytes of NaN after shared memory, which no thread may write
    emulator::entry = entry;
    emulator::failure = nullptr;
    memcpy(emulator::arguments, arguments, count * sizeof *arguments);
    emulator::threads.resize(block);
    for (auto &t : emulator::threads) emulator::start_thread(t);
    char *memory = (char *)aligned_alloc(1024, (shared_bytes + GUARD + 1023) / 1024 * 1024);
    shared_memory = memory;
    blockDim.x = block;
    gridDim.x = grid;
    std::vector<unsigned> order;
    for (unsigned i = first; i < grid; i++) {
        order.push_back(i);
        std::swap(order[rand() % order.size()], order.back());
    }
    struct sigaction on_invalid_access = {}, before;
    on_invalid_access.sa_handler = [](int) { emulator::fail("memory outside of the arguments is accessed"); };
    on_invalid_access.sa_flags = SA_NODEFER;  // `fail` leaves the handler by a jump
    sigaction(SIGSEGV, &on_invalid_access, &before);
    if (!_setjmp(emulator::failed))
        for (unsigned i : order) {
            blockIdx.x = i;
            memset(memory, 0xff, shared_bytes + GUARD);
            emulator::blocks_run++;
            emulator::run_block();
            for (i64 j = shared_bytes; j < shared_bytes + GUARD; j++)
                if (memory[j] != char(0xff)) emulator::fail("more shared memory is written than the block has");
        }
    sigaction(SIGSEGV, &before, nullptr);
    for (auto &t : emulator::threads) free(t.stack);
    free(memory);
    return emulator::failure;
}
