// Code shared by packing of weights and unpacking of their gradients: parameters of any type, and assignment of items
// to threads

#include "../cuda/types.cuh"

template <int C>
DEVICE Floats<C> values(const PARAMETER *p) { return to_floats(load<C>(p)); }
DEVICE float value(const PARAMETER *p) { return values<1>(p).at[0]; }
template <class E>
DEVICE void put(E *p, float x) { store(p, from_floats<E>(Floats<1>{x})); }

// whether the thread's item is one of these `n`; otherwise `item` becomes its index among the following ones
DEVICE bool is_among(unsigned &i, unsigned n) {
    bool among = i < n;
    i -= among ? 0 : n;
    return among;
}
