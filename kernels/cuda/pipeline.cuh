// places in shared memory that are filled and read in turn, each with a barrier for "full" and one for "empty"

#include "types.cuh"

template <int PLACES>
struct Ring {
    unsigned barriers;
    int turn = 0;  // of two rounds, in one register
    __device__ __forceinline__ Ring(unsigned barriers) : barriers(barriers) {}
    __device__ __forceinline__ int phase() const { return turn >= PLACES; }
    __device__ __forceinline__ int place() const { return turn - phase() * PLACES; }
    __device__ __forceinline__ unsigned full() const { return barriers + place() * 8; }
    __device__ __forceinline__ unsigned empty() const { return full() + PLACES * 8; }
    __device__ __forceinline__ unsigned empty_before() const { return full() + ((place() == 0) * PLACES + PLACES - 1) * 8; }
    __device__ __forceinline__ void next() { turn = turn + 1 < 2 * PLACES ? turn + 1 : 0; }
};
