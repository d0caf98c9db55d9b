// Stands for Metal's standard library, so that clang++ compiles the sources of Metal kernels. Two ways:
//   METAL_SPACES   address spaces are those of the compiler: no pointer converts from one to another. Checked, never run.
//   otherwise      half and bfloat are classes with no conversion that Metal does not have. Runs on machine.cpp.
// What Metal lacks, such as double, is no name below this header.
#pragma once
#include "machine.h"

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using size_t = decltype(sizeof 0);
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;

#ifdef METAL_SPACES

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
typedef _Float16 half;
typedef __bf16 bfloat;
// Metal copies structs between address spaces; C++ asks for operators. kernel_text.py adds these to structs.
#define METAL_COPIES(S) \
  S() = default; S(const S&) = default; S& operator=(const S&) = default; \
  S(const device S&); S& operator=(const device S&); S(const constant S&); S& operator=(const constant S&);

#else

#define device
#define constant
#define threadgroup static __attribute__((section("threadgroup_memory")))
#define METAL_COPIES(S)

struct half {  // converts from and to float by itself, as in Metal
  _Float16 value;
  half() = default;
  half(float x) : value(_Float16(x)) {}
  operator float() const { return float(value); }
};
struct bfloat {  // converts to float by itself, but from float only where that is written
  ushort bits;
  bfloat() = default;
  explicit bfloat(float x) {
    const uint u = __builtin_bit_cast(uint, x), rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    bits = ushort((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 64 : rounded);
  }
  explicit bfloat(half) = delete;
  operator float() const { return __builtin_bit_cast(float, uint(bits) << 16); }
  operator half() const = delete;
};
// Arithmetic of two numbers of 16 bits rounds to 16 bits.
template <class T> struct OfNarrow {};
template <> struct OfNarrow<half> { using type = half; };
template <> struct OfNarrow<bfloat> { using type = bfloat; };
#define METAL_ARITHMETIC(op) \
  template <class T> typename OfNarrow<T>::type operator op(T a, T b) { return T(float(a) op float(b)); } \
  inline half& operator op##=(half& a, float b) { return a = half(float(a) op b); } \
  inline bfloat& operator op##=(bfloat& a, bfloat b) { return a = bfloat(float(a) op float(b)); }
METAL_ARITHMETIC(+) METAL_ARITHMETIC(-) METAL_ARITHMETIC(*) METAL_ARITHMETIC(/)

#endif

#define thread
typedef half float16_t;
typedef bfloat bfloat16_t;
typedef machine::Place uint3;

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

// The place of a call is its return address, which exists once in the code.
template <class T> __attribute__((noinline)) T simd_exchange(T value, uint partner) {
  machine::exchange(&value, sizeof(T), partner, __builtin_return_address(0));
  return value;
}
template <class T> __attribute__((always_inline)) inline T simd_shuffle_xor(T value, ushort mask) {
  return simd_exchange(value, (machine::thread_index() ^ mask) % machine::SIMD);
}
template <class T> __attribute__((always_inline)) inline T simd_shuffle(T value, ushort lane) {
  return simd_exchange(value, lane);
}
__attribute__((noinline)) inline void wait_here() { machine::wait_at_barrier(__builtin_return_address(0)); }
__attribute__((always_inline)) inline void threadgroup_barrier(mem_flags) { wait_here(); }

template <class To, class From> To as_type(From value) { return __builtin_bit_cast(To, value); }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float exp2(float x) { return __builtin_exp2f(x); }
namespace fast {
inline float exp(float x) { return __builtin_exp2f(x * 1.44269504f); }
inline float cos(float x) { return __builtin_cosf(x); }
inline float sin(float x) { return __builtin_sinf(x); }
}
namespace precise {
inline float exp(float x) { return __builtin_expf(x); }
inline float rsqrt(float x) { return 1 / __builtin_sqrtf(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }
}
}  // namespace metal
using namespace metal;

#pragma GCC poison double try catch throw new delete virtual dynamic_cast typeid goto
