// The recurrences of Longhorn and Mamba, for one state n of one channel d of a sequence.
// docs/kernels/mathematics.md derives the equations.
//
// Macros of the scan kernels:
//   INPUT           element type of the tensors: bf16, fp16 or float
//   RECURRENCE      Longhorn or SelectiveStateSpace
//   STATES          number N of states per channel: 4, 8, 16, 32 or 64
//   CHUNK           tokens between saved states; the initial state, which is 0, is not saved
//   LANE_STATES     states of a channel that one lane holds (NL); STATES / LANE_STATES lanes share a channel
//   LANE_CHANNELS   number of channels per lane (DL)
//   TILE            tokens of a tile in shared memory
//   WARPS           warps per CTA
//   MIN_CTAS        CTAs that must fit on a multiprocessor, which limits the registers per thread
//   CTA_BYTES       bytes of shared memory per CTA, computed by the host
//   STAGES          number of tiles in shared memory, including tiles that are being copied
//   VECTOR          channels that one instruction copies, limited by the alignment of the tensors
//
// G directions, B batch, L tokens, D channels, N states. Tokens are counted in the reading order of a direction.
// Step logits include their bias in the functions of a recurrence.
//
// A recurrence computes S_t = decay_t S_{t-1} + drive_t and y_t = sum over n of q_t S_t.
// The gradient of a state is G_t = dL/dS_t = dy_t q_t + decay_{t+1} G_{t+1}.
// A recurrence provides the following functions:
//   scaled_A          A as the other functions expect it
//   step_size         step size of a step logit: eps of Longhorn, dt of Mamba
//   decay             decay_t; its second argument is k^2 for Longhorn, and unused for Mamba
//   slope             factor of the step logit's gradient
//   update            computes S_t from S_{t-1}, and returns values that the gradients need (`Kept`)
//   gradients         computes decay_t G_t from G_t, and adds to sums over states, channels and tokens
//                     (states: sum_x and sum_step_size; channels: dk; tokens: dA)
//   dx, dstep_logit   gradients of x and of the step logit, computed from sum_x and sum_step_size
//   dnorm             contribution of a channel to dL/d(k.k)

#include "../cuda/types.cuh"

// Longhorn (Liu et al., 2024, Algorithm 1, eq. 6), with the step size
//   eps = beta / (1 + beta k.k) = 1 / (1 + u + k.k)        beta = sigmoid(step_logit), u = exp(-step_logit)
// and, with the residual r = x - k S_{t-1}, the recurrence
//   S_t = (1 - eps k^2) S_{t-1} + eps k x = S_{t-1} + eps k r
// The gradients for one n follow from the last form. The gradient of k excludes k.k in eps:
//   dL/dx = eps k G        dL/deps = k r G        dL/dk = eps G (r - k S_{t-1}) = eps G (2 r - x)
//   deps/dstep_logit = eps^2 u                    deps/d(k.k) = -eps^2
// sum_step_size is eps dL/deps.
struct Longhorn {
    static constexpr bool HAS_A = false, HAS_NORM = true;
    DEVICE float scaled_A(float) { return 0; }
    // If exp overflows to infinity, the result is 0, which is the limit of eps.
    DEVICE float step_size(float step_logit, float kk) { return reciprocal(1 + kk + exp_fast(-step_logit)); }
    // The exponential is clamped, because 0 times infinity would be NaN.
    DEVICE float slope(float step_logit, float eps) { return eps * min_or_nan(exp_fast(-step_logit), 0x1p126f); }

    DEVICE void update(float &S, float x, float eps, float k, float) { S = fmaf(eps * k, fmaf(-k, S, x), S); }
    // The decay is computed from k^2, which the channels of a lane share.
    DEVICE float decay(float eps, float k_squared, float) { return fmaf(-eps, k_squared, 1); }

    struct Kept { float residual; };
    DEVICE void update(float &S, Kept &kept, float x, float eps, float k, float) {
        kept.residual = fmaf(-k, S, x);
        S = fmaf(eps * k, kept.residual, S);
    }
    DEVICE void gradients(float &G, Kept kept, float x, float eps, float k, float, float &sum_x, float &sum_step_size,
                          float &dk, float &) {
        float eps_G = eps * G;
        float eps_G_residual = eps_G * kept.residual;
        sum_x = fmaf(k, eps_G, sum_x);
        sum_step_size = fmaf(k, eps_G_residual, sum_step_size);
        dk = fmaf(2, eps_G_residual, fmaf(-x, eps_G, dk));
        G = fmaf(-k * k, eps_G, G);
    }
    DEVICE float dx(float sum_x, float) { return sum_x; }
    DEVICE float dstep_logit(float, float sum_step_size, float, float slope) { return sum_step_size * slope; }
    DEVICE float dnorm(float sum_step_size, float eps) { return -eps * sum_step_size; }
};

// Mamba (Gu & Dao, 2023, Algorithm 2), where k is called b, and each state of a channel has its own A:
//   S_t = exp(A dt) S_{t-1} + dt b x        dt = softplus(step_logit)
// With e = dL/d(A dt) = exp(A dt) S_{t-1} G, the gradients for one n are:
//   dL/dx = dt b G        dL/db = dt x G        dL/dA = dt e        dL/ddt = x b G + A e
// The functions receive A log2(e) instead of A, so that a decay is one exp2. sum_step_size contains log2(e), too.
struct SelectiveStateSpace {
    static constexpr bool HAS_A = true, HAS_NORM = false;
    DEVICE float scaled_A(float A) { return A * LOG2E; }
    // Softplus is max(step_logit, 0) + log(1 + u) with u = exp(-|step_logit|).
    // A polynomial for log(1 + u) / u needs no branches and has a relative error of 2^-21 even for small u.
    DEVICE float step_size(float step_logit, float) {
        float u = exp_fast(-fabsf(step_logit)), p = -0.008778933f;
        p = fmaf(p, u, 0.04498657f), p = fmaf(p, u, -0.10902282f), p = fmaf(p, u, 0.17847203f);
        p = fmaf(p, u, -0.24536864f), p = fmaf(p, u, 0.33284062f), p = fmaf(p, u, -0.49998179f);
        return fmaf(u, fmaf(p, u, 1), fmaxf(step_logit, 0));
    }
    DEVICE float slope(float step_logit, float) { return reciprocal(1 + exp_fast(-step_logit)); }

    DEVICE void update(float &S, float x, float dt, float b, float A) { S = fmaf(decay(dt, b, A), S, dt * x * b); }
    DEVICE float decay(float dt, float, float A) { return exp2_fast(A * dt); }

    struct Kept { float S_previous, decay; };
    DEVICE void update(float &S, Kept &kept, float x, float dt, float b, float A) {
        kept = {S, decay(dt, b, A)};
        S = fmaf(kept.decay, S, dt * x * b);
    }
    DEVICE void gradients(float &G, Kept kept, float x, float dt, float b, float A, float &sum_x, float &sum_step_size,
                          float &db, float &dA) {
        sum_x = fmaf(b, G, sum_x);
        db = fmaf(dt * x, G, db);
        G *= kept.decay;
        float dexponent = G * kept.S_previous;
        sum_step_size = fmaf(A, dexponent, sum_step_size);
        dA = fmaf(dt, dexponent, dA);
    }
    DEVICE float dx(float sum_x, float dt) { return dt * sum_x; }
    DEVICE float dstep_logit(float sum_x, float sum_step_size, float x, float slope) {
        return fmaf(x, sum_x, sum_step_size * (1 / LOG2E)) * slope;
    }
    DEVICE float dnorm(float, float) { return 0; }
};

typedef RECURRENCE Recurrence;
typedef INPUT Element;
constexpr int N = STATES, NL = LANE_STATES, DL = LANE_CHANNELS;
