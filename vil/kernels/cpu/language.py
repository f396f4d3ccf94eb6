"""Building blocks of CPU kernels: memory by address, task counters, and functions that vectorize.

Importing this module imports Numba, which takes a third of a second. Therefore only modules with code of kernels import
this module, and the compiler imports such modules only to compile a kernel.

A kernel is a function of an array of 64-bit numbers (see `compiler`). The kernel runs in several threads at once, and
each thread processes tasks until none is left. Loops over `LANES` channels become vector instructions.
"""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model
from numba.np.arrayobj import populate_array
from numba.np.unsafe.ndarray import to_fixed_tuple

from .compiler import BYTES, FAST, LANES

FLOAT, LONG = ir.FloatType(), ir.IntType(64)


@intrinsic
def floats(context, address):
    """Cast an address to a pointer to floats, for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], FLOAT.as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def longs(context, address):
    """Cast an address to a pointer to 64-bit integers, for `carray`."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], LONG.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic(prefer_literal=True)
def local_floats(context, count):
    """Allocate a constant number of uninitialized floats on the thread's stack, for `carray`."""
    size = count.literal_value

    def generate(context, builder, signature, arguments):
        memory = cgutils.alloca_once(builder, ir.ArrayType(FLOAT, size))
        memory.align = 64
        return builder.bitcast(memory, FLOAT.as_pointer())

    return types.CPointer(types.float32)(count), generate


@intrinsic(prefer_literal=True)
def local_rows(context, rows):
    """Allocate an uninitialized array (rows, LANES) on the thread's stack, for a constant number of rows."""
    count, array = rows.literal_value, types.Array(types.float32, 2, "C")

    def generate(context, builder, signature, arguments):
        memory = cgutils.alloca_once(builder, ir.ArrayType(FLOAT, max(count, 1) * LANES))
        memory.align = 64
        result, data = context.make_array(array)(context, builder), builder.bitcast(memory, FLOAT.as_pointer())
        shape, strides = (LONG(count), LONG(LANES)), (LONG(BYTES * LANES), LONG(BYTES))
        populate_array(result, data=data, shape=shape, strides=strides, itemsize=LONG(BYTES), meminfo=None)
        return result._getvalue()

    return array(rows), generate


@intrinsic
def address_of(context, pointer):
    """Return the address of a pointer to floats."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], LONG)

    return types.int64(types.CPointer(types.float32)), generate


@intrinsic
def count_up(context, counter):
    """Atomically increment the integer that a pointer points to, and return the integer's previous value."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], LONG(1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@intrinsic
def second(context, numbers):
    """Return a pointer to the second of two consecutive 64-bit integers, given a pointer to the first."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [LONG(1)], source_etype=LONG)

    return types.CPointer(types.int64)(types.CPointer(types.int64)), generate


@intrinsic
def as_float(context, bits):
    """Reinterpret the bits of a 32-bit integer as a float."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _as_bits(context, value):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def load_lanes(context, address, values):
    """Copy `LANES` floats from an address to an array by vector loads, which LLVM does not always emit for a loop."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(FLOAT, LANES).as_pointer()
        target = builder.bitcast(context.make_array(values)(context, builder, arguments[1]).data, vector)
        builder.store(builder.load(builder.inttoptr(arguments[0], vector), align=BYTES), target, align=BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, values), generate


@intrinsic
def store_lanes(context, address, values):
    """Copy `LANES` floats from an array to an address by vector stores."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(FLOAT, LANES).as_pointer()
        source = builder.bitcast(context.make_array(values)(context, builder, arguments[1]).data, vector)
        builder.store(builder.load(source, align=BYTES), builder.inttoptr(arguments[0], vector), align=BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, values), generate


class _Vector(types.Type):
    """Vector type of `WIDTH` floats with +, - and *. In loops over arrays, LLVM may not keep sums in registers.

    Some kernels therefore keep sums in variables of this type.
    """


vector = _Vector("vector")
WIDTH = 16  # floats per vector: one AVX-512 register, two AVX2 registers or four NEON registers
FLOATS = ir.VectorType(FLOAT, WIDTH)


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, of_type):
        super().__init__(manager, of_type, FLOATS)


def _arithmetic(operation, instruction):
    infer_global(operation)(type("", (ConcreteTemplate,), {"cases": [signature(vector, vector, vector)]}))

    @lower_builtin(operation, vector, vector)
    def generate(context, builder, signature, arguments):
        return getattr(builder, instruction)(*arguments, flags=sorted(FAST))


for _operation, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _arithmetic(_operation, _instruction)


def _place(context, builder, kind, values, index):
    data = context.make_array(kind)(context, builder, values).data
    return builder.bitcast(builder.gep(data, [index], source_etype=FLOAT), FLOATS.as_pointer())


@intrinsic
def load(context, values, index):
    """Load the `WIDTH` floats that start at an index of an array as a vector."""

    def generate(context, builder, signature, arguments):
        return builder.load(_place(context, builder, signature.args[0], *arguments), align=BYTES)

    return vector(values, types.int64), generate


@intrinsic
def store(context, values, index, value):
    def generate(context, builder, signature, arguments):
        place = _place(context, builder, signature.args[0], *arguments[:2])
        builder.store(arguments[2], place, align=BYTES)
        return context.get_dummy_value()

    return types.void(values, types.int64, vector), generate


@intrinsic
def broadcast(context, value):
    def generate(context, builder, signature, arguments):
        first = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), arguments[0], LONG(0))
        return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), None))

    return vector(types.float32), generate


@intrinsic
def total(context, values):
    """Return the sum of a vector's elements."""

    def generate(context, builder, signature, arguments):
        of_vector = ir.FunctionType(FLOAT, (FLOAT, FLOATS))
        reduce = cgutils.get_or_insert_function(builder.module, of_vector, f"llvm.vector.reduce.fadd.v{WIDTH}f32")
        return builder.call(reduce, (FLOAT(-0.0), arguments[0]), fastmath=sorted(FAST))

    return types.float32(vector), generate


@intrinsic
def _prefetch(context, address):
    def generate(context, builder, signature, arguments):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), (byte, number, number, number))
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, (builder.inttoptr(arguments[0], byte), number(0), number(3), number(1)))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def square_root(context, value):
    """Compute the square root by a CPU instruction, because a library function may be missing in the process."""

    def generate(context, builder, signature, arguments):
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [FLOAT]), arguments)

    return types.float32(types.float32), generate


ZERO, ONE, TWO, HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
LOG2_E, LN_2 = np.float32(np.log2(np.e)), np.float32(np.log(2))
_SMALLEST, _LARGEST, _INFINITE = np.float32(-126), np.float32(126), np.float32(128)
_INFINITY = np.float32(np.inf)
_HALF_LARGEST = np.float32(62)  # the product of two powers of 2 with exponents up to 62 has a normal reciprocal
_ROUND = np.float32(1.5 * 2**23)  # adding `_ROUND` to a float rounds the float to an integer
_POWERS = [np.float32(np.log(2) ** i / np.prod(range(1, i + 1))) for i in range(1, 7)]
_P1, _P2, _P3, _P4, _P5, _P6 = _POWERS  # coefficients of 2^f for |f| <= 1/2, with a relative error of about 2e-7
_A3, _A5, _A7, _A9, _A11, _A13 = [np.float32(1 / i) for i in (3, 5, 7, 9, 11, 13)]

# compile without "reassoc", because reordering would remove the addition and subtraction of `_ROUND`
_exactly = njit(fastmath={"contract"}, error_model="numpy")


@_exactly
def exp2_clamped(x):
    """Return 2^x for x clamped to [-126, 126], where results are normal numbers. NaN gives NaN."""
    x = _SMALLEST if x < _SMALLEST else x
    x = _LARGEST if x > _LARGEST else x
    rounded = x + _ROUND
    f = x - (rounded - _ROUND)
    power = ONE + f * (_P1 + f * (_P2 + f * (_P3 + f * (_P4 + f * (_P5 + f * _P6)))))
    scale = as_float(np.int32(_as_bits(ONE) + np.int32(_as_bits(rounded) << np.int32(23))))
    return power * scale


@_exactly
def exp2(x):
    """Return 2^x, clamped to [2^-126, 2^126] for x up to 127 and infinite for larger x. NaN gives NaN."""
    return _INFINITY if x > _LARGEST + ONE else exp2_clamped(x)


@_exactly
def sigmoid(x):
    return ONE / (ONE + exp2_clamped(-LOG2_E * x))


@_exactly
def sigmoids(x, y):
    """Return sigmoid(x) and sigmoid(y) by one division instead of two. Results are clamped to at least about 2^-62."""
    x, y = -LOG2_E * x, -LOG2_E * y
    x = ONE + exp2_clamped(_HALF_LARGEST if x > _HALF_LARGEST else x)
    y = ONE + exp2_clamped(_HALF_LARGEST if y > _HALF_LARGEST else y)
    reciprocal = ONE / (x * y)
    return y * reciprocal, x * reciprocal


@_exactly
def softplus(x):
    """Compute log(1 + exp(x)) as max(x, 0) + log1p(u) with u = exp(-|x|) and log1p(u) = 2 artanh(u / (2 + u))."""
    u = exp2_clamped(-LOG2_E * abs(x))
    s = u / (TWO + u)
    z = s * s
    series = ONE + z * (_A3 + z * (_A5 + z * (_A7 + z * (_A9 + z * (_A11 + z * _A13)))))
    return (ZERO if x < ZERO else x) + TWO * s * series


# LLVM inlines `inlined` functions, because Numba's own inlining takes up to twice as long in large kernels
inlined = njit(error_model="numpy", fastmath=FAST, forceinline=True)
# Numba inlines `spliced` functions, so that LLVM knows that the arrays in their loops do not overlap
spliced = njit(error_model="numpy", fastmath=FAST, inline="always")


@spliced
def unpack(arguments, count):
    """Return the first `count` elements of a kernel's array of arguments as a tuple. `count` is a constant."""
    return to_fixed_tuple(carray(arguments, (count,)), count)


@spliced
def local_row():
    """Allocate an uninitialized array (LANES,) on the thread's stack."""
    return local_rows(1)[0]


@inlined
def block_of_channels(task, blocks, D):
    """Return the sequence, the first channel and the number of channels of a task among `blocks` tasks per sequence."""
    first = task % blocks * LANES
    return task // blocks, first, min(LANES, D - first)


@inlined
def row(address, size):
    return carray(floats(address), (size,))


@inlined
def lanes(address):
    return carray(floats(address), (LANES,))


@inlined
def load_rows(address, stride, width, rows, values):
    """Copy `rows` rows of `width` channels from an address to an array, padding each row with zeros."""
    for n in range(rows):
        if width < LANES:
            source = lanes(address + n * stride)
            for d in range(width):
                values[n, d] = source[d]
            for d in range(width, LANES):
                values[n, d] = ZERO
        else:
            load_lanes(address + n * stride, values[n])


@inlined
def store_row(address, width, values):
    if width < LANES:
        target = lanes(address)
        for d in range(width):
            target[d] = values[d]
    else:
        store_lanes(address, values)


@inlined
def store_rows(address, stride, width, rows, values):
    """Copy `rows` rows of `width` channels from an array to memory at an address."""
    for n in range(rows):
        store_row(address + n * stride, width, values[n])


@inlined
def prefetch_row(address):
    """Prefetch `LANES` consecutive floats with one instruction per `WIDTH` floats, the size of a 64-byte cache line."""
    for d in range(0, LANES, WIDTH):
        _prefetch(address + BYTES * d)


@inlined
def readable_row(start, stride, t, ahead, width, padded):
    """Return an address where `LANES` channels of row t can be read.

    If the row is shorter, it is copied and padded. The row that is `ahead` rows later is prefetched.
    """
    prefetch_row(start + (t + ahead) * stride)
    address = start + t * stride
    if width < LANES:
        load_rows(address, 0, width, 1, carray(padded, (1, LANES)))
        address = address_of(padded)
    return address


@inlined
def clear(values, rows):
    for n in range(rows):
        for d in range(LANES):
            values[n, d] = ZERO


def nothing():
    """Build a kernel that does nothing, to test whether kernels can be compiled."""

    def kernel(arguments):
        count_up(arguments)

    return kernel
