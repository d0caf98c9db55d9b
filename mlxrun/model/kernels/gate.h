// Input: product [rows, 2 * SIZE] of gate and up. Output: gated [rows, SIZE] = silu(gate) * up.
  const int at = BLOCK_Y * THREADS + THREAD;
  const long row = BLOCK_X;
  if (at >= SIZE) return;
  const float gate = float(product[row * 2 * SIZE + at]), up = float(product[row * 2 * SIZE + SIZE + at]);
#include "silu.h"
  gated[row * SIZE + at] = number;
