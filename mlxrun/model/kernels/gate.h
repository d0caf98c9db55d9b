// Input: product [rows, 2 * SIZE] of gate and up. Output: gated [rows, SIZE] = silu(gate) * up. A thread has WIDE
// numbers, which divides SIZE.
  const int at = (BLOCK_Y * THREADS + THREAD) * WIDE;
  const long row = BLOCK_X;
  if (at >= SIZE) return;
  const Numbers<T, WIDE> gates = *(const DEVICE Numbers<T, WIDE>*)(product + row * 2 * SIZE + at);
  const Numbers<T, WIDE> ups = *(const DEVICE Numbers<T, WIDE>*)(product + row * 2 * SIZE + SIZE + at);
  Numbers<T, WIDE> made;
  UNROLLED
  for (int i = 0; i < WIDE; i++) {
    const float gate = float(gates.x[i]), up = float(ups.x[i]);
#include "silu.h"
    made.x[i] = number;
  }
  store(gated + row * SIZE + at, made);
