// Augmentation of uint8 images (B, 3, H, W): random crop with resize, transforms and normalization.
// Operations that PIL supports are computed in PIL's order and types, without fused multiply-adds.
// Therefore the resulting pixels are identical to PIL's pixels.
// Offsets into a batch have 64 bits, and offsets into an image have 32 bits.
//
// augment/__init__.py declares the parameters of the kernels.

#include "../cuda/types.cuh"

typedef unsigned char u8;
typedef unsigned long long u64;

// Four adjacent bytes in one register.
struct Bytes {
    unsigned word;
    __device__ int operator[](int i) const { return __byte_perm(word, 0, 0x4440 + i); }
    __device__ void add(int i, u8 byte) { word |= unsigned(byte) << 8 * i; }
};
// Loads and stores four adjacent bytes, of which the first `count` exist.
DEVICE Bytes load_bytes(const u8 *from, int count) {
    if (count >= 4 && size_t(from) % 4 == 0) return {*reinterpret_cast<const unsigned *>(from)};
    Bytes bytes = {};
    UNROLLED for (int i = 0; i < 4; i++)
        if (i < count) bytes.add(i, from[i]);
    return bytes;
}
DEVICE void store_bytes(u8 *to, Bytes bytes, int count) {
    if (count >= 4 && size_t(to) % 4 == 0)
        *reinterpret_cast<unsigned *>(to) = bytes.word;
    else
        UNROLLED for (int i = 0; i < 4; i++)
            if (i < count) to[i] = bytes[i];
}

DEVICE u8 to_byte(double v) { return v <= 0 ? 0 : v >= 255 ? 255 : u8(v); }

// PIL resizes with integer weights that have 22 fractional bits.
constexpr int ONE = 1 << 22;
DEVICE u8 level(int sum) { return min(max(sum >> 22, 0), 255); }

// Resizing of a crop along one axis from `length` to `resized` pixels. The result starts with resized pixel `offset`.
struct Axis {
    i64 length, resized, offset, weights;
};
struct Crop {
    const u8 *pixels;
    i64 row, plane, flip;  // distance of rows and of channels in pixels; whether to flip horizontally
    Axis axes[2];  // vertical and horizontal axis
};
// For each pixel of the result: first source pixel, end of the source pixels, and weights (taps, size).
struct Taps {
    int *first, *end, *weights;
    i64 size;
    __device__ Taps(const Axis &axis, int *memory, i64 size)
        : first(memory + axis.weights), end(first + size), weights(end + size), size(size) {}
};

DEVICE double filter(double x, bool bicubic) {
    x = fabs(x);
    if (!bicubic) return x < 1 ? 1 - x : 0;
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

// One CTA computes the weights of one axis of one crop. Pixels outside the resized crop have no weights.
extern "C" __global__ void __launch_bounds__(256) resize_weights(PARAMETERS_resize_weights) {
    begin_kernel();
    Axis axis = crops[blockIdx.x / 2].axes[blockIdx.x % 2];
    Taps taps(axis, memory, blockIdx.x % 2 ? W : H);
    double scale = double(axis.length) / axis.resized, stretch = scale < 1 ? 1 : scale;
    double support = (bicubic ? 2 : 1) * stretch, shrink = 1 / stretch;
    for (i64 i = threadIdx.x; i < taps.size; i += blockDim.x) {
        i64 of = axis.offset + i;
        bool inside = of >= 0 && of < axis.resized;
        double centre = (of + 0.5) * scale, sum = 0;
        int first = inside ? max(int(centre - support + 0.5), 0) : 0;
        int end = inside ? min(int(centre + support + 0.5), int(axis.length)) : 0;
        taps.first[i] = first;
        taps.end[i] = end;
        for (int pixel = first; pixel < end; pixel++) sum += filter((pixel - centre + 0.5) * shrink, bicubic);
        for (int pixel = first; pixel < end; pixel++) {
            double weight = filter((pixel - centre + 0.5) * shrink, bicubic) / sum;
            taps.weights[(pixel - first) * taps.size + i] = int(weight * ONE + (weight < 0 ? -0.5 : 0.5));
        }
    }
}

// Tile of TILE x TILE pixels of an image that a CTA computes, with four adjacent pixels (row, x) to (row, x + 3) per thread.
constexpr int TILE = 32, WARPS = TILE * TILE / 4 / 32;
struct Tile {
    int image, top, left, row, x;
    __device__ Tile(int height, int width) {
        int across = (width + TILE - 1) / TILE, tiles = (height + TILE - 1) / TILE * across, tile = blockIdx.x % tiles;
        image = blockIdx.x / tiles, top = tile / across * TILE, left = tile % across * TILE;
        row = top + threadIdx.x / (TILE / 4), x = left + threadIdx.x % (TILE / 4) * 4;
    }
};

// The rows of the crop are processed in chunks. In each chunk, the warps first resize the rows horizontally, with one
// column of the tile per lane, and write the rows to shared memory.
// Then each thread adds the rows that its four adjacent pixels of the result depend on.
constexpr int CHUNK = 128, ROWS_AT_ONCE = 2;
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) crop_resize_flip(PARAMETERS_crop_resize_flip) {
    begin_kernel();
    __shared__ unsigned rows[CHUNK][3][TILE / 4];
    int height = H, width = W, lane = threadIdx.x % 32;
    Tile tile(height, width);
    int top = tile.top, row = tile.row, of_lane = tile.left + lane, four = threadIdx.x % (TILE / 4);
    Crop crop = crops[tile.image];
    __builtin_assume(__isGlobal(crop.pixels));  // so that the compiler uses the faster loads of global memory
    Taps vertical(crop.axes[0], memory, H), horizontal(crop.axes[1], memory, W);

    // The tile depends on the rows of the crop from `begin` to `end`. Its last row inside the resized crop is `last`.
    int last = min(i64(min(top + TILE, height)), crop.axes[0].resized - crop.axes[0].offset) - 1;
    int begin = vertical.first[top], end = last < top ? 0 : vertical.end[last];
    int column = crop.flip ? width - 1 - of_lane : of_lane, first = 0, taps = 0;
    if (of_lane < width) first = horizontal.first[column], taps = horizontal.end[column] - first;
    const int *across = horizontal.weights + column;
    int row_first = row < height ? vertical.first[row] : 0, row_end = row < height ? vertical.end[row] : 0;
    const int *down = vertical.weights + row;
    int sums[3][4];
    UNROLLED for (int c = 0; c < 3; c++) UNROLLED for (int i = 0; i < 4; i++) sums[c][i] = ONE / 2;
    for (int start = begin; start < end; start += CHUNK) {
        int stop = min(start + CHUNK, end);
        for (int y = start + int(threadIdx.x) / 32 * ROWS_AT_ONCE; y < stop; y += WARPS * ROWS_AT_ONCE) {
            int resized[ROWS_AT_ONCE][3];
            const u8 *pixels[ROWS_AT_ONCE];
            UNROLLED for (int r = 0; r < ROWS_AT_ONCE; r++) {
                pixels[r] = crop.pixels + min(y + r, stop - 1) * crop.row + first;
                UNROLLED for (int c = 0; c < 3; c++) resized[r][c] = ONE / 2;
            }
#pragma unroll 4
            for (int k = 0; k < taps; k++) {
                int weight = across[k * width];
                UNROLLED for (int r = 0; r < ROWS_AT_ONCE; r++)
                    UNROLLED for (int c = 0; c < 3; c++) resized[r][c] += pixels[r][c * crop.plane + k] * weight;
            }
            UNROLLED for (int r = 0; r < ROWS_AT_ONCE; r++)
                if (y + r < stop)
                    UNROLLED for (int c = 0; c < 3; c++)
                        reinterpret_cast<u8 *>(rows[y + r - start][c])[lane] = level(resized[r][c]);
        }
        __syncthreads();
        for (int y = max(row_first, start); y < min(row_end, stop); y++) {
            int weight = down[(y - row_first) * height];
            UNROLLED for (int c = 0; c < 3; c++) {
                Bytes bytes = {rows[y - start][c][four]};
                UNROLLED for (int i = 0; i < 4; i++) sums[c][i] += bytes[i] * weight;
            }
        }
        __syncthreads();
    }
    if (row >= height) return;
    UNROLLED for (int c = 0; c < 3; c++) {
        Bytes levels = {};
        UNROLLED for (int i = 0; i < 4; i++) levels.add(i, level(sums[c][i]));
        store_bytes(out + ((tile.image * i64(3) + c) * H + row) * W + tile.x, levels, width - tile.x);
    }
}

// Macros: the codes of operations, such as AFFINE and COLOR; bit i of TABLE_MASK is 1 if operation i has a table.
struct Operation {
    i64 code;
    double arguments[6];
};

DEVICE unsigned grey(unsigned red, unsigned green, unsigned blue) {
    return (19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16;
}
DEVICE u8 blend(int plain, int pixel, double factor) { return to_byte(plain + float(factor) * (pixel - plain)); }

DEVICE bool has_table(i64 code) { return TABLE_MASK >> code & 1; }

// Statistics of a channel that determine the result of an operation for `value`.
struct Levels {
    int low, high;  // minimum and maximum of the channel
    unsigned last, below;  // number of pixels with the maximum, and number of pixels below `value`
};
DEVICE int mapped(i64 code, double argument, int value, Levels levels, int mean, i64 pixels) {
    if (code == AUTOCONTRAST && levels.low < levels.high) {
        double scale = 255.0 / (levels.high - levels.low), offset = -levels.low * scale;
        return to_byte(value * scale + offset);
    }
    if (code == EQUALIZE && levels.low < levels.high) {
        i64 step = (pixels - levels.last) / 255;
        return step ? int(min((step / 2 + levels.below) / step, i64(255))) : value;
    }
    if (code == INVERT || code == SOLARIZE && value >= argument) return 255 - value;
    if (code == POSTERIZE && argument < 8) return value & ~((1 << 8 - int(argument)) - 1);
    if (code == SOLARIZEADD && value < 128) return min(max(value + int(argument), 0), 255);
    if (code == CONTRAST) return blend(mean, value, argument);
    if (code == BRIGHTNESS) return blend(0, value, argument);
    return value;
}

// Writes tables (B, 3, 256) of the operations that map the values of each channel. One CTA processes one image.
extern "C" __global__ void __launch_bounds__(512) build_tables(PARAMETERS_build_tables) {
    begin_kernel();
    // number of histograms per channel, which reduce conflicts because adjacent pixels often have the same value
    constexpr int COPIES = 8;
    __shared__ unsigned counts[3 * 256 * COPIES];
    __shared__ int lowest[3];
    __shared__ int highest[3];
    __shared__ u64 sum[1];
    i64 code = operations[blockIdx.x].code;
    double argument = operations[blockIdx.x].arguments[0];
    if (!has_table(code)) return;
    const u8 *red = images + blockIdx.x * 3 * pixels, *green = red + pixels, *blue = green + pixels;
    for (int i = threadIdx.x; i < 3 * 256 * COPIES; i += blockDim.x) counts[i] = 0;
    if (threadIdx.x == 0) sum[0] = 0;
    __syncthreads();
    if (code == AUTOCONTRAST || code == EQUALIZE)
#pragma unroll 4
        for (i64 i = threadIdx.x; i < pixels; i += blockDim.x)
#pragma unroll
            for (int c = 0; c < 3; c++)
                atomicAdd(&counts[(c * 256 + red[c * pixels + i]) * COPIES + threadIdx.x % COPIES], 1u);
    if (code == CONTRAST) {
        u64 part = 0;
#pragma unroll 4
        for (i64 i = threadIdx.x; i < pixels; i += blockDim.x) part += grey(red[i], green[i], blue[i]);
        atomicAdd(&sum[0], part);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * 256; i += blockDim.x)
        for (int copy = 1; copy < COPIES; copy++) counts[i * COPIES] += counts[i * COPIES + copy];
    __syncthreads();
    if (threadIdx.x < 3) {
        int low = 256, high = -1;
        unsigned below = 0;
        for (int value = 0; value < 256; value++) {
            unsigned *count = counts + (threadIdx.x * 256 + value) * COPIES;
            if (count[0]) low = min(low, value), high = value;
            count[1] = below;
            below += count[0];
        }
        lowest[threadIdx.x] = low, highest[threadIdx.x] = high;
    }
    __syncthreads();
    int mean = int(double(sum[0]) / pixels + 0.5);
    for (int i = threadIdx.x; i < 3 * 256; i += blockDim.x) {
        int value = i % 256, low = lowest[i / 256], high = highest[i / 256];
        Levels levels = {low, high, low < high ? counts[(i - value + high) * COPIES] : 0, counts[i * COPIES + 1]};
        tables[blockIdx.x * i64(3 * 256) + i] = mapped(code, argument, value, levels, mean, pixels);
    }
}

// Returns v, or an integer as a double, without the slow conversion instruction.
DEVICE double exactly(double v) { return v; }
DEVICE double exactly(int v) {
    constexpr int EXPONENT_52 = 0x43300000, SIGN = 1 << 31;
    return __hiloint2double(EXPONENT_52, v ^ SIGN) - (4503599627370496.0 + 2147483648.0);  // 2^52 + 2^31
}

// Cubic interpolation (Keys, a = -1) between `at` and `next` of four equidistant values, at distance t from `at`.
template <class T>
DEVICE double cubic(T before, T at, T next, T after, double t) {
    T slope = next - before, bend = 2 * (before - at) + next - after, twist = at - before - next + after;
    return exactly(at) + t * (exactly(slope) + t * (exactly(bend) + t * exactly(twist)));
}

// PIL's affine transform, which maps pixel (x, y) to position (ax + by + c, dx + ey + f) of the source image.
struct Source {
    int columns[4], rows[4];  // columns and offsets of rows, clamped to the image
    double right, down;  // distance from the second column and from the second row
    bool inside;
    __device__ Source(const double *m, int x, int y, int H, int W) {
        double from_x = m[0] * (x + 0.5) + m[1] * (y + 0.5) + m[2], from_y = m[3] * (x + 0.5) + m[4] * (y + 0.5) + m[5];
        inside = from_x >= 0 && from_x < W && from_y >= 0 && from_y < H;
        if (!inside) return;
        from_x -= 0.5, from_y -= 0.5;
        int column = floor(from_x), row = floor(from_y);
        right = from_x - column, down = from_y - row;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            columns[i] = min(max(column + i - 1, 0), W - 1);
            rows[i] = min(max(row + i - 1, 0), H - 1) * W;
        }
    }
    __device__ u8 sample(const u8 *pixels, bool bicubic) const {
        double v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!bicubic && i % 3 == 0) continue;
            const u8 *row = pixels + rows[i];
            int at = row[columns[1]], next = row[columns[2]];
            v[i] = bicubic ? cubic<int>(row[columns[0]], at, next, row[columns[3]], right) : at + (next - at) * right;
        }
        return to_byte(bicubic ? cubic(v[0], v[1], v[2], v[3], down) : v[1] + (v[2] - v[1]) * down);
    }
};

// PIL's smoothing filter, which does not change pixels at the edges.
DEVICE int smooth(const u8 *pixels, int x, int y, int H, int W) {
    const u8 *at = pixels + y * W + x;
    if (x == 0 || y == 0 || x == W - 1 || y == H - 1) return *at;
    int sum = 4 * *at;
    for (int i = -1; i <= 1; i++) sum += at[i * W - 1] + at[i * W] + at[i * W + 1];
    return (2 * sum + 13) / 26;
}

// Applies each image's operation. Copies images for GAUSSIANBLUR.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) apply_operations(PARAMETERS_apply_operations) {
    begin_kernel();
    int height = H, width = W, pixels = height * width;
    Tile tile(height, width);
    int y = tile.row, x = tile.x, count = width - x;
    if (y >= height) return;
    const Operation &operation = operations[tile.image];
    const u8 *from = images + tile.image * i64(3) * pixels, *of_image = tables + tile.image * i64(3 * 256);
    u8 *to = out + tile.image * i64(3) * pixels;
    i64 code = operation.code;
    double argument = operation.arguments[0];
    if (code == AFFINE) {
        // The 32 pixels that a warp transforms at once are 8 x 4 adjacent pixels, so their sources are in few cache lines.
        u8 fill[3] = {u8(red), u8(green), u8(blue)};
#pragma unroll 1
        for (x = tile.left + threadIdx.x % 8; x < min(tile.left + TILE, width); x += 8) {
            Source source(operation.arguments, x, y, height, width);
#pragma unroll 1
            for (int c = 0; c < 3; c++)
                to[c * pixels + y * width + x] = source.inside ? source.sample(from + c * pixels, bicubic) : fill[c];
        }
        return;
    }
    Bytes given[3], result[3] = {};
    UNROLLED for (int c = 0; c < 3; c++) given[c] = load_bytes(from + (c * pixels + y * width + x), count);
    if (code == SHARPNESS) {
#pragma unroll 1
        for (int j = 0; j < min(count, 4); j++)
            UNROLLED for (int c = 0; c < 3; c++)
                result[c].add(j, blend(smooth(from + c * pixels, x + j, y, height, width), given[c][j], argument));
    } else if (code == COLOR) {
        UNROLLED for (int j = 0; j < 4; j++) {
            int plain = grey(given[0][j], given[1][j], given[2][j]);
            UNROLLED for (int c = 0; c < 3; c++) result[c].add(j, blend(plain, given[c][j], argument));
        }
    } else if (has_table(code)) {
        UNROLLED for (int c = 0; c < 3; c++)
            UNROLLED for (int j = 0; j < 4; j++) result[c].add(j, of_image[c * 256 + given[c][j]]);
    } else {
        UNROLLED for (int c = 0; c < 3; c++) result[c] = given[c];
    }
    UNROLLED for (int c = 0; c < 3; c++) store_bytes(to + (c * pixels + y * width + x), result[c], count);
}

// PIL's Gaussian blur along one axis, in place, as three box filters with fractional ends.
// A line has `length` pixels at distance `step`, and a channel has `lines` lines at distance `apart`.
// A CTA processes `together` lines.
extern "C" __global__ void __launch_bounds__(256) gaussian_blur(PARAMETERS_gaussian_blur) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    int parts = (lines + together - 1) / together, plane = blockIdx.x / parts, first = blockIdx.x % parts * together;
    const Operation &operation = operations[plane / 3];
    if (operation.code != GAUSSIANBLUR) return;
    u8 *from = reinterpret_cast<u8 *>(shared), *to = from + length * together;  // shape (length, together)
    u8 *pixels = images + plane * length * lines + first * apart;
    int width = min(int(together), int(lines) - first), all = length * width, last = length - 1;
    // Threads copy pixels in the order of memory.
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        int at = step == 1 ? i % int(length) : i / width, line = step == 1 ? i / int(length) : i % width;
        from[at * together + line] = pixels[at * step + line * apart];
    }
    __syncthreads();
    int radius = operation.arguments[0];
    unsigned weight = operation.arguments[1], end_weight = operation.arguments[2];  // with 24 fractional bits
    for (int pass = 0; pass < 3; pass++) {
        for (int i = threadIdx.x; i < all; i += blockDim.x) {
            int at = i / width, line = i % width;
            auto pixel = [&](int j) -> unsigned { return from[min(max(j, 0), last) * together + line]; };
            unsigned sum = 0, ends = pixel(at - radius - 1) + pixel(at + radius + 1);
            for (int j = at - radius; j <= at + radius; j++) sum += pixel(j);
            to[at * together + line] = (sum * weight + ends * end_weight + (1 << 23)) >> 24;
        }
        __syncthreads();
        u8 *other = from;
        from = to, to = other;
    }
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        int at = step == 1 ? i % int(length) : i / width, line = step == 1 ? i / int(length) : i % width;
        pixels[at * step + line * apart] = from[at * together + line];
    }
}

// Parameters of the kernel `finish` for an image: key of the random numbers, box to erase, and mixing with a partner.
// From `top` to `bottom` and `left` to `right`, mixing adds `share` of the image and 1 - `share` of the partner.
struct Rest {
    unsigned key;
    int erased_top, erased_left, erased_height, erased_width, partner;
    float top, bottom, left, right, share;
};
enum Noise { CONSTANT, OF_CHANNEL, OF_PIXEL };

// Returns four normally distributed random numbers, which are a function of the key and two counters.
// Uses Philox4x32-10 (Salmon et al. 2011) and the Box-Muller transform.
DEVICE Floats<4> normal_numbers(unsigned key, unsigned group, unsigned kind) {
    unsigned a = group, b = kind, c = 0, d = 0, key_0 = key, key_1 = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 first = u64(0xd2511f53u) * a, second = u64(0xcd9e8d57u) * c;
        a = unsigned(second >> 32) ^ b ^ key_0, b = unsigned(second);
        c = unsigned(first >> 32) ^ d ^ key_1, d = unsigned(first);
        key_0 += 0x9e3779b9u, key_1 += 0xbb67ae85u;
    }
    constexpr float PART = 1.0f / 4294967296.0f;
    float far = sqrtf(-2 * logf((a + 1.0f) * PART)), further = sqrtf(-2 * logf((c + 1.0f) * PART));
    float turn = 2 * PART * b, other_turn = 2 * PART * d;
    return {far * cospif(turn), far * sinpif(turn), further * cospif(other_turn), further * sinpif(other_turn)};
}

// Mean and standard deviation of a channel of normalized images.
struct Channel {
    float mean, deviation, reciprocal;
    __device__ Channel(double mean, double deviation)
        : mean(mean), deviation(deviation), reciprocal(1 / float(deviation)) {}
    // Returns (v - mean) / deviation, rounded like a division, by the faster product with the reciprocal and a correction.
    __device__ float normalized(int v) const {
        float centred = v - mean, quotient = centred * reciprocal;
        return fmaf(fmaf(-quotient, deviation, centred), reciprocal, quotient);
    }
};
// Position of four adjacent elements (c, y, x) to (c, y, x + 3). `four` counts such groups in an image.
struct Position { int c, y, x, four; };

// Normalizes four adjacent elements, and replaces erased elements by noise or, in mode CONSTANT, by 0.
DEVICE Floats<4> normalise(const Rest &rest, Bytes bytes, const Channel &channel, Position at, i64 noise) {
    Floats<4> values, numbers = {};
    UNROLLED for (int i = 0; i < 4; i++) values.at[i] = channel.normalized(bytes[i]);
    int y = at.y - rest.erased_top, x = at.x - rest.erased_left;
    if (y < 0 || y >= rest.erased_height || x <= -4 || x >= rest.erased_width) return values;
    if (noise != CONSTANT) numbers = normal_numbers(rest.key, noise == OF_PIXEL ? at.four : 0, noise);
    float of_channel = at.c == 0 ? numbers.at[0] : at.c == 1 ? numbers.at[1] : numbers.at[2];
    UNROLLED for (int i = 0; i < 4; i++)
        if (x + i >= 0 && x + i < rest.erased_width) values.at[i] = noise == OF_CHANNEL ? of_channel : numbers.at[i];
    return values;
}

// Normalization, random erasing and mixing, with `parts` CTAs per channel and four adjacent elements of a row per thread.
extern "C" __global__ void __launch_bounds__(256) finish(PARAMETERS_finish) {
    begin_kernel();
    int plane = blockIdx.x / int(parts), image = plane / 3, c = plane % 3, height = H, width = W;
    int fours = (width + 3) / 4, four = blockIdx.x % int(parts) * blockDim.x + threadIdx.x;
    Position at = {c, four / fours, four % fours * 4, c * height * fours + four};
    if (at.y >= height) return;
    Channel channel = c == 0 ? Channel(mean_red, deviation_red)
                      : c == 1 ? Channel(mean_green, deviation_green) : Channel(mean_blue, deviation_blue);
    const Rest &rest = rests[image];
    int offset = (c * height + at.y) * width + at.x, elements = 3 * height * width, count = width - at.x;
    Floats<4> values = normalise(rest, load_bytes(images + (image * i64(elements) + offset), count), channel, at, noise);
    if (rest.share != 1 && at.y >= rest.top && at.y < rest.bottom && at.x + 4 > rest.left && at.x < rest.right) {
        Bytes partner = load_bytes(images + (rest.partner * i64(elements) + offset), count);
        Floats<4> others = normalise(rests[rest.partner], partner, channel, at, noise);
        UNROLLED for (int i = 0; i < 4; i++)
            if (at.x + i >= rest.left && at.x + i < rest.right)
                values.at[i] = rest.share * values.at[i] + (1 - rest.share) * others.at[i];
    }
    float *to = out + (image * i64(elements) + offset);
    if (width % 4 == 0)
        store(to, values);
    else
        UNROLLED for (int i = 0; i < 4; i++)
            if (i < count) to[i] = values.at[i];
}
