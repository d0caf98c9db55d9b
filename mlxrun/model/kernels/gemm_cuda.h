// `widen` makes two numbers of a word of the weight: i, and the one half a word behind it. 2^7 + q of bfloat16 and
// 2^10 + q of float16 are made by setting bits, which is exact for the q that fit.
#define UINT unsigned
#define MIN(a, b) min(a, b)
template <typename T> struct Two;
template <> struct Two<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static constexpr unsigned BASE = 0x43004300;
};
template <> struct Two<__half> {
  using Type = __half2;
  static constexpr unsigned BASE = 0x64006400;
};
template <typename V> __device__ V read_as(unsigned bits) { return *(V*)&bits; }
template <typename V> __device__ unsigned read_bits(V value) { return *(unsigned*)&value; }
template <typename T> __device__ unsigned repeat(T number) {
  typename Two<T>::Type both;
  both.x = both.y = number;
  return read_bits(both);
}
template <typename T, int BITS>
__device__ unsigned widen(unsigned word, int i, unsigned scale, unsigned bias) {
  using Pair = typename Two<T>::Type;
  const Pair base = read_as<Pair>(Two<T>::BASE);
  unsigned bits;  // by one instruction: (shifted & mask) | BASE
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(bits)
      : "r"(word >> (BITS * i)), "n"(BITS == 4 ? 0x000f000f : 0x00ff00ff), "r"(Two<T>::BASE));
  return read_bits(__hfma2(__hsub2(read_as<Pair>(bits), base), read_as<Pair>(scale), read_as<Pair>(bias)));
}
template <>
__device__ unsigned widen<__nv_bfloat16, 8>(unsigned word, int i, unsigned scale, unsigned bias) {
  const float s = __uint_as_float(scale << 16), b = __uint_as_float(bias << 16);
  const float one = float((word >> (8 * i)) & 0xff), two = float((word >> (8 * i + 16)) & 0xff);
  return read_bits(__floats2bfloat162_rn(fmaf(one, s, b), fmaf(two, s, b)));
}
#define MULTIPLY(T, NAME)                                                                             \
  __device__ void multiply_tile(const T*, int, float* c, const unsigned* a, unsigned b0, unsigned b1) { \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 "                      \
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                              \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                     \
  }
MULTIPLY(__nv_bfloat16, "bf16")
MULTIPLY(__half, "f16")
// Two numbers that begin at `i` of one array and at `j` of the other. Those of the shared memory move together.
#define STORE_PAIR(to, i, from, j) *(float2*)&(to)[i] = make_float2((from)[j], (from)[(j) + 1])
#define ADD_PAIR(to, i, from, j)                        \
  {                                                     \
    const float2 pair = *(const float2*)&(from)[j];     \
    (to)[i] += pair.x, (to)[(i) + 1] += pair.y;         \
  }
