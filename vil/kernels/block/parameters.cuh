// Loads, stores and distribution of work for packing weights and unpacking their gradients.

#include "../cuda/types.cuh"

template <int C>
DEVICE Floats<C> values(const PARAMETER *p) { return to_floats(load<C>(p)); }
DEVICE float value(const PARAMETER *p) { return values<1>(p).at[0]; }
template <class E>
DEVICE void put(E *p, float x) { store(p, from_floats<E>(Floats<1>{x})); }

// Returns whether item i is among the next n items. Otherwise, subtracts n from i.
DEVICE bool is_among(unsigned &i, unsigned n) {
    bool among = i < n;
    i -= among ? 0 : n;
    return among;
}
