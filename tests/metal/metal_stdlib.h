// A stand-in for Metal's standard library, for clang on Linux: what MLX's own headers ask for and what kernels of this
// project's kind use, no more. What is missing is a compile error, never a silent difference.
//
// It is compiled in two ways. With EMULATOR_TYPE_CHECK the address spaces are real ones of clang's, so that a pointer
// to `device` memory does not become one to `constant` memory; nothing is run. Without, they are erased, since clang's
// sanitizers look at ordinary memory only, and barriers and simdgroup operations call the runtime.
#pragma once
#include "runtime.h"

#define __METAL__ 1
#define __METAL_VERSION__ 310
#define METAL_FUNC inline __attribute__((unused))
// Code of the emulator's own inside a kernel, which is not to be checked as the kernel's.
#define EMULATOR_INTERNAL __attribute__((disable_sanitizer_instrumentation, noinline))

// What the runtime calls: the kernel's entry, and the first and last byte of the library that it is in.
#define EMULATOR_ENTRY extern "C" __attribute__((visibility("default"))) EMULATOR_INTERNAL
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];  // of the linker's making
EMULATOR_ENTRY const char* emulator_image_begin() { return __ehdr_start; }
EMULATOR_ENTRY const char* emulator_image_end() { return _end; }

#define thread
#ifdef EMULATOR_TYPE_CHECK
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant
#define threadgroup
#endif

// ---- types

typedef __INT8_TYPE__ int8_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __INT16_TYPE__ int16_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
}
// Vectors of 64-bit integers end at two: ThreadSanitizer passes over accesses of more than 16 bytes.
#define EMULATOR_VECTORS(T) \
  typedef metal::vec<T, 2> T##2; \
  typedef metal::vec<T, 3> T##3; \
  typedef metal::vec<T, 4> T##4;
EMULATOR_VECTORS(char)
EMULATOR_VECTORS(uchar)
EMULATOR_VECTORS(short)
EMULATOR_VECTORS(ushort)
EMULATOR_VECTORS(int)
EMULATOR_VECTORS(uint)
typedef metal::vec<long, 2> long2;
typedef metal::vec<ulong, 2> ulong2;
EMULATOR_VECTORS(half)
EMULATOR_VECTORS(float)
EMULATOR_VECTORS(bfloat)

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <class A, class B>
struct is_same : false_type {};
template <class A>
struct is_same<A, A> : true_type {};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <class T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

template <class T>
struct numeric_limits {  // of integers
  static constexpr T min() { return T(-1) < T(0) ? T(1ul << (8 * sizeof(T) - 1)) : T(0); }
  static constexpr T max() { return T(~(ulong)min()); }
  static constexpr T lowest() { return min(); }
};
#define EMULATOR_FLOAT_LIMITS(T, largest, smallest, step) \
  template <> \
  struct numeric_limits<T> { \
    static constexpr T min() { return (T)smallest; } \
    static constexpr T max() { return (T)largest; } \
    static constexpr T lowest() { return (T)-largest; } \
    static constexpr T epsilon() { return (T)step; } \
    static constexpr T infinity() { return (T)__builtin_inff(); } \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
EMULATOR_FLOAT_LIMITS(float, 0x1.fffffep127f, 0x1p-126f, 0x1p-23f)
EMULATOR_FLOAT_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f)
EMULATOR_FLOAT_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f)

}  // namespace metal

template <class To, class From>
METAL_FUNC To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different sizes");
  return __builtin_bit_cast(To, value);
}

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 0x1.fffffep127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define INT_MAX 2147483647
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.4426950408889634074f
#define M_LN2_F 0.69314718055994530942f

// ---- arithmetic
//
// MLX's bf16_math.h makes the functions for bfloat from `__metal_NAME(float..., bool is_fast)`. Metal has each function
// for float, half and their vectors; here a half is computed in float and rounded once, and `precise::` and `fast::`
// are the same functions: a GPU's own last digits cannot be known.

#define __METAL_MAYBE_FAST_MATH__ false
#define __METAL_FAST_MATH__ true
#define __METAL_PRECISE_MATH__ false
#define EMULATOR_UNARY(name, internal, expression) \
  METAL_FUNC float __metal_##internal(float x, bool) { return expression; } \
  namespace metal { \
  METAL_FUNC float name(float x) { return __metal_##internal(x, false); } \
  METAL_FUNC half name(half x) { return (half)__metal_##internal(x, false); } \
  template <class T, int N> \
  METAL_FUNC vec<T, N> name(vec<T, N> x) { \
    for (int i = 0; i < N; i++) x[i] = name((T)x[i]); \
    return x; \
  } \
  namespace precise { using metal::name; } \
  namespace fast { using metal::name; } \
  }
#define EMULATOR_BINARY(name, internal, expression) \
  METAL_FUNC float __metal_##internal(float x, float y, bool) { return expression; } \
  EMULATOR_BINARY_NAME(name, internal)
#define EMULATOR_BINARY_NAME(name, internal) \
  namespace metal { \
  METAL_FUNC float name(float x, float y) { return __metal_##internal(x, y, false); } \
  METAL_FUNC half name(half x, half y) { return (half)__metal_##internal(x, y, false); } \
  template <class T, int N> \
  METAL_FUNC vec<T, N> name(vec<T, N> x, vec<T, N> y) { \
    for (int i = 0; i < N; i++) x[i] = name((T)x[i], (T)y[i]); \
    return x; \
  } \
  namespace precise { using metal::name; } \
  namespace fast { using metal::name; } \
  }
#define EMULATOR_TERNARY(name, expression) \
  METAL_FUNC float __metal_f##name(float x, float y, float z, bool) { return expression; } \
  namespace metal { \
  METAL_FUNC float name(float x, float y, float z) { return __metal_f##name(x, y, z, false); } \
  METAL_FUNC half name(half x, half y, half z) { return (half)__metal_f##name(x, y, z, false); } \
  }
#define EMULATOR_BUILTIN(name) EMULATOR_UNARY(name, name, __builtin_##name##f(x))
EMULATOR_BUILTIN(acos)
EMULATOR_BUILTIN(acosh)
EMULATOR_BUILTIN(asin)
EMULATOR_BUILTIN(asinh)
EMULATOR_BUILTIN(atan)
EMULATOR_BUILTIN(atanh)
EMULATOR_BUILTIN(ceil)
EMULATOR_BUILTIN(cos)
EMULATOR_BUILTIN(cosh)
EMULATOR_BUILTIN(exp)
EMULATOR_BUILTIN(exp2)
EMULATOR_BUILTIN(fabs)
EMULATOR_BUILTIN(floor)
EMULATOR_BUILTIN(log)
EMULATOR_BUILTIN(log10)
EMULATOR_BUILTIN(log2)
EMULATOR_BUILTIN(rint)
EMULATOR_BUILTIN(round)
EMULATOR_BUILTIN(sin)
EMULATOR_BUILTIN(sinh)
EMULATOR_BUILTIN(sqrt)
EMULATOR_BUILTIN(tan)
EMULATOR_BUILTIN(tanh)
EMULATOR_BUILTIN(trunc)
EMULATOR_UNARY(cospi, cospi, __builtin_cosf(M_PI_F * x))
EMULATOR_UNARY(sinpi, sinpi, __builtin_sinf(M_PI_F * x))
EMULATOR_UNARY(tanpi, tanpi, __builtin_tanf(M_PI_F * x))
EMULATOR_UNARY(exp10, exp10, __builtin_powf(10.0f, x))
EMULATOR_UNARY(rsqrt, rsqrt, 1.0f / __builtin_sqrtf(x))
EMULATOR_UNARY(fract, fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
EMULATOR_UNARY(abs, abs, __builtin_fabsf(x))
EMULATOR_BINARY(atan2, atan2, __builtin_atan2f(x, y))
EMULATOR_BINARY(divide, divide, x / y)
EMULATOR_BINARY(fmax, fmax, __builtin_fmaxf(x, y))
EMULATOR_BINARY(fmin, fmin, __builtin_fminf(x, y))
EMULATOR_BINARY(fmod, fmod, __builtin_fmodf(x, y))
EMULATOR_BINARY(pow, pow, __builtin_powf(x, y))
EMULATOR_BINARY(powr, powr, __builtin_powf(x, y))
EMULATOR_BINARY_NAME(max, fmax)
EMULATOR_BINARY_NAME(min, fmin)
EMULATOR_TERNARY(max3, __builtin_fmaxf(x, __builtin_fmaxf(y, z)))
EMULATOR_TERNARY(min3, __builtin_fminf(x, __builtin_fminf(y, z)))
EMULATOR_TERNARY(median3, __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z)))
METAL_FUNC float __metal_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
METAL_FUNC float __metal_nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
METAL_FUNC float __metal_ldexp(float x, int exponent, bool) { return __builtin_ldexpf(x, exponent); }
METAL_FUNC float __metal_frexp(float x, int* exponent) { return __builtin_frexpf(x, exponent); }

namespace metal {

#define EMULATOR_OF_FLOATS(T) \
  METAL_FUNC T fma(T x, T y, T z) { return (T)__builtin_fmaf(x, y, z); } \
  METAL_FUNC T clamp(T x, T low, T high) { return fmin(fmax(x, low), high); } \
  METAL_FUNC T mix(T x, T y, T a) { return x + (y - x) * a; } \
  METAL_FUNC T sign(T x) { return (T)((x > 0) - (x < 0)); } \
  METAL_FUNC T copysign(T x, T y) { return (T)__builtin_copysignf(x, y); } \
  METAL_FUNC T ldexp(T x, int exponent) { return (T)__builtin_ldexpf(x, exponent); } \
  METAL_FUNC bool isnan(T x) { return x != x; } \
  METAL_FUNC bool isinf(T x) { return __builtin_fabsf(x) == INFINITY; } \
  METAL_FUNC bool isfinite(T x) { return __builtin_fabsf(x) < INFINITY; } \
  METAL_FUNC bool signbit(T x) { return __builtin_copysignf(1.0f, x) < 0; } \
  METAL_FUNC T select(T x, T y, bool condition) { return condition ? y : x; }
EMULATOR_OF_FLOATS(float)
EMULATOR_OF_FLOATS(half)
namespace precise { using metal::fma; }
namespace fast { using metal::fma; }

#define EMULATOR_OF_INTEGERS(T) \
  METAL_FUNC T max(T x, T y) { return x > y ? x : y; } \
  METAL_FUNC T min(T x, T y) { return x < y ? x : y; } \
  METAL_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); } \
  METAL_FUNC T select(T x, T y, bool condition) { return condition ? y : x; }
EMULATOR_OF_INTEGERS(char)
EMULATOR_OF_INTEGERS(uchar)
EMULATOR_OF_INTEGERS(short)
EMULATOR_OF_INTEGERS(ushort)
EMULATOR_OF_INTEGERS(int)
EMULATOR_OF_INTEGERS(uint)
EMULATOR_OF_INTEGERS(long)
EMULATOR_OF_INTEGERS(ulong)
METAL_FUNC int abs(int x) { return x < 0 ? -x : x; }
METAL_FUNC long abs(long x) { return x < 0 ? -x : x; }
METAL_FUNC uint mulhi(uint x, uint y) { return (ulong)x * y >> 32; }
METAL_FUNC int mulhi(int x, int y) { return (long)x * y >> 32; }
METAL_FUNC ulong mulhi(ulong x, ulong y) { return (unsigned __int128)x * y >> 64; }
METAL_FUNC uint rotate(uint x, uint distance) { return x << (distance & 31) | x >> (-distance & 31); }
METAL_FUNC ulong rotate(ulong x, ulong distance) { return x << (distance & 63) | x >> (-distance & 63); }
METAL_FUNC uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
METAL_FUNC uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
METAL_FUNC uint popcount(uint x) { return __builtin_popcount(x); }

template <class T, int N>
METAL_FUNC T dot(vec<T, N> x, vec<T, N> y) {
  T sum = 0;
  for (int i = 0; i < N; i++) sum += x[i] * y[i];
  return sum;
}

// ---- barriers and simdgroup operations
//
// Each takes the line that called it: threads that wait on different lines wait for different things.

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }

METAL_FUNC void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator_barrier("threadgroup_barrier", (int)flags, line);
}
METAL_FUNC void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  emulator_barrier("simdgroup_barrier", (int)flags, line);
}

}  // namespace metal

namespace emulator {

template <class T>
EMULATOR_INTERNAL T get(const char* slots, uint lane) {
  T value;
  __builtin_memcpy(&value, slots + lane * SLOT_BYTES, sizeof(T));
  return value;
}
template <class T>
EMULATOR_INTERNAL void set(char* slots, uint lane, T value) {
  __builtin_memcpy(slots + lane * SLOT_BYTES, &value, sizeof(T));
}

struct Add {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return x + y; }
};
struct Multiply {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return x * y; }
};
struct Max {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return metal::max(x, y); }
};
struct Min {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return metal::min(x, y); }
};
struct And {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return x & y; }
};
struct Or {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return x | y; }
};
struct Xor {
  template <class T>
  EMULATOR_INTERNAL static T apply(T x, T y) { return x ^ y; }
};

// Pairs of lanes, then pairs of pairs: the order of a butterfly of shuffles.
template <class T, class Operation>
EMULATOR_INTERNAL uint reduce(const char* values, const uint*, uint lanes, char* results) {
  T partial[SIMD_WIDTH];
  for (uint lane = 0; lane < SIMD_WIDTH; lane++)
    if (lanes >> lane & 1) partial[lane] = get<T>(values, lane);
  for (uint step = 1, there = lanes; step < SIMD_WIDTH; step *= 2)
    for (uint lane = 0; lane < SIMD_WIDTH; lane += 2 * step) {
      const uint other = lane + step;
      if (!(there >> other & 1)) continue;
      partial[lane] = there >> lane & 1 ? Operation::apply(partial[lane], partial[other]) : partial[other];
      there |= 1u << lane;
    }
  for (uint lane = 0; lane < SIMD_WIDTH; lane++) set(results, lane, partial[0]);
  return 0;
}

template <class T, class Operation, bool is_inclusive>
EMULATOR_INTERNAL uint prefix(const char* values, const uint*, uint lanes, char* results) {
  T total = metal::is_same_v<Operation, Multiply> ? (T)1 : (T)0;
  for (uint lane = 0; lane < SIMD_WIDTH; lane++) {
    if (!(lanes >> lane & 1)) continue;
    if (!is_inclusive) set(results, lane, total);
    total = Operation::apply(total, get<T>(values, lane));
    if (is_inclusive) set(results, lane, total);
  }
  return 0;
}

// The lane to read from. Those that a shift finds outside of the simdgroup keep their own value.
EMULATOR_INTERNAL inline uint from_lane(uint, uint argument) { return argument; }
EMULATOR_INTERNAL inline uint from_xor(uint lane, uint argument) { return lane ^ argument; }
EMULATOR_INTERNAL inline uint from_above(uint lane, uint argument) {
  return lane + argument < SIMD_WIDTH ? lane + argument : lane;
}
EMULATOR_INTERNAL inline uint from_below(uint lane, uint argument) { return lane < argument ? lane : lane - argument; }
EMULATOR_INTERNAL inline uint from_above_around(uint lane, uint argument) { return (lane + argument) % SIMD_WIDTH; }
EMULATOR_INTERNAL inline uint from_below_around(uint lane, uint argument) { return (lane - argument) % SIMD_WIDTH; }

template <class T, uint (*source_of)(uint lane, uint argument)>
EMULATOR_INTERNAL uint shuffle(const char* values, const uint* arguments, uint lanes, char* results) {
  uint undefined = 0;
  for (uint lane = 0; lane < SIMD_WIDTH; lane++) {
    if (!(lanes >> lane & 1)) continue;
    const uint source = source_of(lane, arguments[lane]);
    const bool is_there = source < SIMD_WIDTH && lanes >> source & 1;
    if (!is_there) undefined |= 1u << lane;
    set(results, lane, get<T>(values, is_there ? source : lane));
  }
  return undefined;
}

template <class T>
EMULATOR_INTERNAL uint first(const char* values, const uint*, uint lanes, char* results) {
  for (uint lane = 0; lane < SIMD_WIDTH; lane++) set(results, lane, get<T>(values, __builtin_ctz(lanes)));
  return 0;
}

template <class T>
EMULATOR_INTERNAL T simd(const char* name, int line, T value, uint argument, EmulatorCombine combine) {
  static_assert(sizeof(T) <= SLOT_BYTES, "no simdgroup operation moves that many bytes");
  T result;
  __builtin_memcpy(&result, emulator_simd(name, line, &value, sizeof(T), argument, combine), sizeof(T));
  return result;
}

EMULATOR_INTERNAL inline uint lane() { return emulator_thread->thread_index_in_simdgroup; }

}  // namespace emulator

namespace metal {

#define EMULATOR_SIMD(T, name, ...) \
  METAL_FUNC T name(T value, int line = __builtin_LINE()) { \
    return emulator::simd<T>(#name, line, value, 0, emulator::__VA_ARGS__); \
  }
#define EMULATOR_SHUFFLE(T, name, source) \
  METAL_FUNC T name(T value, ushort argument, int line = __builtin_LINE()) { \
    return emulator::simd<T>(#name, line, value, argument, emulator::shuffle<T, emulator::source>); \
  }
#define EMULATOR_FILL(T, name, is_filled, source) \
  METAL_FUNC T name(T value, T filling, ushort distance, int line = __builtin_LINE()) { \
    const uint lane = emulator::lane(); \
    const T moved = emulator::simd<T>(#name, line, value, distance, emulator::shuffle<T, emulator::source>); \
    const T filled = emulator::simd<T>(#name " ", line, filling, distance, emulator::shuffle<T, emulator::source>); \
    return is_filled ? filled : moved; \
  }
#define EMULATOR_SIMD_REDUCTIONS(T) \
  EMULATOR_SIMD(T, simd_sum, reduce<T, emulator::Add>) \
  EMULATOR_SIMD(T, simd_product, reduce<T, emulator::Multiply>) \
  EMULATOR_SIMD(T, simd_max, reduce<T, emulator::Max>) \
  EMULATOR_SIMD(T, simd_min, reduce<T, emulator::Min>) \
  EMULATOR_SIMD(T, simd_prefix_inclusive_sum, prefix<T, emulator::Add, true>) \
  EMULATOR_SIMD(T, simd_prefix_exclusive_sum, prefix<T, emulator::Add, false>) \
  EMULATOR_SIMD(T, simd_prefix_inclusive_product, prefix<T, emulator::Multiply, true>) \
  EMULATOR_SIMD(T, simd_prefix_exclusive_product, prefix<T, emulator::Multiply, false>)
#define EMULATOR_SIMD_BITS(T) \
  EMULATOR_SIMD(T, simd_and, reduce<T, emulator::And>) \
  EMULATOR_SIMD(T, simd_or, reduce<T, emulator::Or>) \
  EMULATOR_SIMD(T, simd_xor, reduce<T, emulator::Xor>)
#define EMULATOR_SIMD_MOVES(T) \
  EMULATOR_SIMD(T, simd_broadcast_first, first<T>) \
  EMULATOR_SHUFFLE(T, simd_broadcast, from_lane) \
  EMULATOR_SHUFFLE(T, simd_shuffle, from_lane) \
  EMULATOR_SHUFFLE(T, simd_shuffle_xor, from_xor) \
  EMULATOR_SHUFFLE(T, simd_shuffle_down, from_above) \
  EMULATOR_SHUFFLE(T, simd_shuffle_up, from_below) \
  EMULATOR_SHUFFLE(T, simd_shuffle_rotate_down, from_above_around) \
  EMULATOR_SHUFFLE(T, simd_shuffle_rotate_up, from_below_around) \
  EMULATOR_FILL(T, simd_shuffle_and_fill_down, lane + distance >= SIMD_WIDTH, from_above_around) \
  EMULATOR_FILL(T, simd_shuffle_and_fill_up, lane < distance, from_below_around)
#define EMULATOR_SIMD_NUMBERS(T) EMULATOR_SIMD_REDUCTIONS(T) EMULATOR_SIMD_MOVES(T)
EMULATOR_SIMD_NUMBERS(float)
EMULATOR_SIMD_NUMBERS(half)
EMULATOR_SIMD_NUMBERS(int)
EMULATOR_SIMD_NUMBERS(uint)
EMULATOR_SIMD_NUMBERS(short)
EMULATOR_SIMD_NUMBERS(ushort)
EMULATOR_SIMD_BITS(int)
EMULATOR_SIMD_BITS(uint)
EMULATOR_SIMD_MOVES(float2)
EMULATOR_SIMD_MOVES(float4)
EMULATOR_SIMD_MOVES(half2)
EMULATOR_SIMD_MOVES(half4)
EMULATOR_SIMD_MOVES(uint2)

// bfloat as MLX's bf16_math.h has it: reductions in float, moves of the bits.
#define EMULATOR_BFLOAT_REDUCTION(name) \
  METAL_FUNC bfloat name(bfloat value, int line = __builtin_LINE()) { return (bfloat)name((float)value, line); }
EMULATOR_BFLOAT_REDUCTION(simd_sum)
EMULATOR_BFLOAT_REDUCTION(simd_product)
EMULATOR_BFLOAT_REDUCTION(simd_max)
EMULATOR_BFLOAT_REDUCTION(simd_min)
EMULATOR_BFLOAT_REDUCTION(simd_prefix_inclusive_sum)
EMULATOR_BFLOAT_REDUCTION(simd_prefix_exclusive_sum)
EMULATOR_BFLOAT_REDUCTION(simd_prefix_inclusive_product)
EMULATOR_BFLOAT_REDUCTION(simd_prefix_exclusive_product)
EMULATOR_SIMD_MOVES(bfloat)

METAL_FUNC bool simd_any(bool value, int line = __builtin_LINE()) { return simd_or((uint)value, line); }
METAL_FUNC bool simd_all(bool value, int line = __builtin_LINE()) { return simd_and((uint)value, line); }
METAL_FUNC bool simd_is_first(int line = __builtin_LINE()) {
  const uint lane = emulator::lane();
  return simd_min(lane, line) == lane;
}

}  // namespace metal

// ---- threadgroup memory: `threadgroup T name[n];` is rewritten to `auto& name = threadgroup_array<T[n]>(...);`

namespace emulator {

template <class T>
struct element {
  typedef T type;
};
template <class T, ulong n>
struct element<T[n]> : element<T> {};
template <class T, int n>
struct element<T __attribute__((ext_vector_type(n)))> : element<T> {};  // what is read as a vector may be written apart

template <class T>
EMULATOR_INTERNAL T& threadgroup_array(const char* name, int line) {
  return *(T*)emulator_threadgroup_array(name, line, sizeof(T), sizeof(typename element<T>::type));
}

}  // namespace emulator

// ---- conversions to 16 bits
//
// On x86-64 clang leaves them to these functions, and so every overflow of a half or bfloat can be seen. (On arm64 they
// are instructions, and no overflow is reported.) Rounding is to nearest, ties to even, as everywhere.

#if defined(__x86_64__) && !defined(EMULATOR_TYPE_CHECK)
extern "C" {

#define EMULATOR_CONVERSION EMULATOR_INTERNAL __attribute__((used))

EMULATOR_CONVERSION half __truncsfhf2(float x) {
  const uint bits = as_type<uint>(x), magnitude = bits & 0x7FFFFFFF;
  uint rounded;
  if (magnitude > 0x7F800000) {
    rounded = 0x7E00;  // not a number
  } else if (magnitude >= 0x477FF000) {  // 65520, which rounds to 65536
    rounded = 0x7C00;
    if (magnitude != 0x7F800000) emulator_overflow("half", __builtin_return_address(0));
  } else if (magnitude < 0x38800000) {  // below 2^-14: multiples of 2^-24, which is the last bit of a float near 0.5
    rounded = as_type<uint>(as_type<float>(magnitude) + 0.5f) - as_type<uint>(0.5f);
  } else {
    rounded = (magnitude + 0xFFF + (magnitude >> 13 & 1) - ((127 - 15) << 23)) >> 13;
  }
  return as_type<half>((ushort)(rounded | (bits >> 16 & 0x8000)));
}

EMULATOR_CONVERSION float __extendhfsf2(half x) {
  const uint bits = as_type<ushort>(x), magnitude = bits & 0x7FFF;
  const uint exponent_moved = as_type<uint>(as_type<float>(magnitude << 13) * 0x1p112f);
  return as_type<float>((magnitude < 0x7C00 ? exponent_moved : magnitude << 13 | 0x7F800000) | (bits & 0x8000) << 16);
}

EMULATOR_CONVERSION bfloat __truncsfbf2(float x) {
  const uint bits = as_type<uint>(x), magnitude = bits & 0x7FFFFFFF;
  const uint rounded = magnitude > 0x7F800000 ? bits | 0x400000 : bits + 0x7FFF + (bits >> 16 & 1);
  if (magnitude < 0x7F800000 && (rounded & 0x7FFFFFFF) >= 0x7F800000)
    emulator_overflow("bfloat", __builtin_return_address(0));
  return as_type<bfloat>((ushort)(rounded >> 16));
}

}
#endif

// ---- vector constructors: float4(a, b, c, d), float4(ab, cd), float4(a), conversions. Last, since they are macros.

namespace emulator {

template <class T>
struct lanes {
  static constexpr int count = 1;
  typedef T type;
};
template <class T, int N>
struct lanes<metal::vec<T, N>> {
  static constexpr int count = N;
  typedef T type;
};

template <class V, class A>
METAL_FUNC void put(V& vector, int& lane, A part) {
  typedef typename lanes<V>::type T;
  if constexpr (lanes<A>::count == 1) {
    vector[lane++] = (T)part;
  } else {
    for (int i = 0; i < lanes<A>::count; i++) vector[lane++] = (T)part[i];
  }
}

template <class V, class... Parts>
METAL_FUNC V make(Parts... parts) {
  constexpr int given = (0 + ... + lanes<Parts>::count);
  static_assert(given == lanes<V>::count || (given == 1 && sizeof...(parts) == 1), "wrong number of lanes");
  V vector;
  int lane = 0;
  (put(vector, lane, parts), ...);
  for (; lane < lanes<V>::count; lane++) vector[lane] = vector[0];
  return vector;
}

}  // namespace emulator

#define char2(...) emulator::make<char2>(__VA_ARGS__)
#define char4(...) emulator::make<char4>(__VA_ARGS__)
#define uchar4(...) emulator::make<uchar4>(__VA_ARGS__)
#define short2(...) emulator::make<short2>(__VA_ARGS__)
#define ushort2(...) emulator::make<ushort2>(__VA_ARGS__)
#define int2(...) emulator::make<int2>(__VA_ARGS__)
#define int3(...) emulator::make<int3>(__VA_ARGS__)
#define int4(...) emulator::make<int4>(__VA_ARGS__)
#define uint2(...) emulator::make<uint2>(__VA_ARGS__)
#define uint3(...) emulator::make<uint3>(__VA_ARGS__)
#define uint4(...) emulator::make<uint4>(__VA_ARGS__)
#define ulong2(...) emulator::make<ulong2>(__VA_ARGS__)
#define half2(...) emulator::make<half2>(__VA_ARGS__)
#define half3(...) emulator::make<half3>(__VA_ARGS__)
#define half4(...) emulator::make<half4>(__VA_ARGS__)
#define float2(...) emulator::make<float2>(__VA_ARGS__)
#define float3(...) emulator::make<float3>(__VA_ARGS__)
#define float4(...) emulator::make<float4>(__VA_ARGS__)
#define bfloat2(...) emulator::make<bfloat2>(__VA_ARGS__)
#define bfloat4(...) emulator::make<bfloat4>(__VA_ARGS__)
