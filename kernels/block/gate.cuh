// The gate in kernels that multiply what it puts out

#include "silu.cuh"

// scale mean silu(z) of two neighbours, where mean = (y_0 + y_1) / 2
struct Gated {
    unsigned gated, mean;
};
template <class T>
DEVICE Gated gate(unsigned y_0, unsigned y_1, unsigned z, float scale) {
    Floats<2> g = unpack(T{}, z), mean = unpack(T{}, y_0) + unpack(T{}, y_1);
    UNROLLED for (int c = 0; c < 2; c++) {
        mean.at[c] *= 0.5f;
        g.at[c] = scale * mean.at[c] * g.at[c] * sigmoid(g.at[c]);
    }
    return {pack(T{}, g.at[0], g.at[1]), pack(T{}, mean.at[0], mean.at[1])};
}
