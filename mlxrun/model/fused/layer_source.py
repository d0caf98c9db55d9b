"""The source of the kernels of a decoder layer, one text for CUDA and Metal.

Each rounds where the library's own kernels round. Norms are computed in float32, and rounded before they are
multiplied by the weight. SiLU and its product are rounded after each operation. A row's result does not
depend on the rows beside it.
"""

from __future__ import annotations

from mlxrun.model.kv.paged import kernel_source
from mlxrun.model.kv.paged.kernel_source import PLACES

_CUDA = """
#define PRECISE_EXP(x) expf(x)
#define EXP2(x) exp2f(x)
#define COS(x) cosf(x)
#define SIN(x) sinf(x)
#define RSQRT(x) rsqrtf(x)
#define ABS(x) fabsf(x)
template <typename T, int N> __device__ void store(T* to, const Numbers<T, N>& from) {
  *(Numbers<T, N>*)to = from;
}
"""
_METAL = """
#define PRECISE_EXP(x) metal::precise::exp(x)
#define EXP2(x) metal::exp2(x)
#define COS(x) metal::fast::cos(x)
#define SIN(x) metal::fast::sin(x)
#define RSQRT(x) metal::precise::rsqrt(x)
#define ABS(x) metal::abs(x)
template <typename T, int N> void store(device T* to, const thread Numbers<T, N>& from) {
  for (int i = 0; i < N; i++) to[i] = from.x[i];
}
"""
HEADERS = {"cuda": kernel_source.HEADERS["cuda"] + _CUDA, "metal": kernel_source.HEADERS["metal"] + _METAL}

# A block has a row, and a thread WIDE numbers beside each other in each turn. Inputs: x and change [rows,
# SIZE], weight [SIZE]. Outputs: summed = x + change, and its norm, both [rows, SIZE].
ADD_NORM = (
    PLACES
    + """
  const long start = (long)BLOCK_X * SIZE;
  Numbers<T, WIDE> kept[TURNS];
  float total = 0;
  UNROLLED
  for (int turn = 0; turn < TURNS; turn++) {
    const int at = (turn * THREADS + THREAD) * WIDE;
    if (at >= SIZE) continue;
    const Numbers<T, WIDE> one = *(const DEVICE Numbers<T, WIDE>*)(x + start + at);
    const Numbers<T, WIDE> two = *(const DEVICE Numbers<T, WIDE>*)(change + start + at);
    for (int i = 0; i < WIDE; i++) {
      kept[turn].x[i] = T(float(one.x[i]) + float(two.x[i]));
      const float value = float(kept[turn].x[i]);
      total += value * value;
    }
    store(summed + start + at, kept[turn]);
  }
  for (int o = 16; o > 0; o /= 2) total += SHUFFLE_XOR(total, o);
  SHARED float totals[THREADS / 32];
  if (THREAD % 32 == 0) totals[THREAD / 32] = total;
  BARRIER;
  total = 0;
  for (int w = 0; w < THREADS / 32; w++) total += totals[w];
  const float scale = RSQRT(total / SIZE + EPS);
  UNROLLED
  for (int turn = 0; turn < TURNS; turn++) {
    const int at = (turn * THREADS + THREAD) * WIDE;
    if (at >= SIZE) continue;
    const Numbers<T, WIDE> factors = *(const DEVICE Numbers<T, WIDE>*)(weight + at);
    for (int i = 0; i < WIDE; i++)
      kept[turn].x[i] = T(float(factors.x[i]) * float(T(float(kept[turn].x[i]) * scale)));
    store(normed + start + at, kept[turn]);
  }
"""
)

# A block of 32 threads has a head of a row. Inputs: product [rows, (HEADS + 2 * KV_HEADS) * SIZE] of queries,
# keys and values; query_weight and key_weight [SIZE] of their norms; frequencies [TURNED / 2]; offsets int32
# [rows]. Outputs: queries [rows, HEADS, 1, SIZE]; written [2 * rows, KV_HEADS, SIZE], keys before values. The
# first TURNED numbers of a head are rotated in pairs, of neighbours or of the two halves.
TURN = (
    PLACES
    + """
  const int head = BLOCK_X, row = BLOCK_Y, rows = product_shape[0];
  const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
  const long from = ((long)row * (HEADS + 2 * KV_HEADS) + head) * SIZE;
  float first[PAIRS], second[PAIRS], total = 0;
  UNROLLED
  for (int n = 0; n < PAIRS; n++) {
    const int pair = n * 32 + THREAD;
    first[n] = second[n] = 0;
    if (pair < SIZE / 2) {
      const bool halves = !TRADITIONAL && pair < TURNED / 2;
      first[n] = float(product[from + (halves ? pair : 2 * pair)]);
      second[n] = float(product[from + (halves ? pair + TURNED / 2 : 2 * pair + 1)]);
    }
    total += first[n] * first[n] + second[n] * second[n];
  }
#if NORMED
  for (int o = 16; o > 0; o /= 2) total += SHUFFLE_XOR(total, o);
  const float scale = RSQRT(total / SIZE + (is_query ? QUERY_EPS : KEY_EPS));
#endif
  UNROLLED
  for (int n = 0; n < PAIRS; n++) {
    const int pair = n * 32 + THREAD;
    if (pair >= SIZE / 2) continue;
    const bool halves = !TRADITIONAL && pair < TURNED / 2;
    const int at = halves ? pair : 2 * pair, other = halves ? pair + TURNED / 2 : 2 * pair + 1;
#if NORMED
    if (!is_value) {
      const float w = float(is_query ? query_weight[at] : key_weight[at]);
      const float v = float(is_query ? query_weight[other] : key_weight[other]);
      first[n] = float(T(w * float(T(first[n] * scale))));
      second[n] = float(T(v * float(T(second[n] * scale))));
    }
#endif
#if ROTATED
    if (!is_value && pair < TURNED / 2) {
#if LISTED
      const float inverse = 1.0f / float(frequencies[pair]);
#else
      const float inverse = EXP2(-(float(pair) / float(TURNED / 2)) * LOG_BASE);
#endif
      const float angle = POSITION_SCALE * float(offsets[row]) * inverse;
      const float cosine = COS(angle), sine = SIN(angle), a = first[n], b = second[n];
      first[n] = a * cosine - b * sine;
      second[n] = a * sine + b * cosine;
    }
#endif
    const T one = T(first[n]), two = T(second[n]);
    if (is_query) {
      const long to = ((long)row * HEADS + head) * SIZE;
      queries[to + at] = one;
      queries[to + other] = two;
    } else {
      const int kv = head - HEADS - (is_value ? KV_HEADS : 0);
      const long to = ((long)(row + (is_value ? rows : 0)) * KV_HEADS + kv) * SIZE;
      written[to + at] = one;
      written[to + other] = two;
    }
  }
"""
)

# Input: product [rows, 2 * SIZE] of gate and up. Output: gated [rows, SIZE] = silu(gate) * up.
GATE = (
    PLACES
    + """
  const int at = BLOCK_X * THREADS + THREAD;
  const long row = BLOCK_Y;
  if (at >= SIZE) return;
  const float gate = float(product[row * 2 * SIZE + at]), up = float(product[row * 2 * SIZE + SIZE + at]);
  const float grown = float(T(1.0f + float(T(PRECISE_EXP(ABS(gate))))));
  const float part = float(T(1.0f / grown));
  const float sigmoid = gate < 0 ? part : float(T(1.0f - part));
  gated[row * SIZE + at] = T(float(T(gate * sigmoid)) * up);
"""
)
