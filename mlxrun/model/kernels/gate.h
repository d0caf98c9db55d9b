// Input: product [rows, 2 * SIZE] of gate and up. Output: gated [rows, SIZE] = silu(gate) * up.
  const int at = BLOCK_Y * THREADS + THREAD;
  const long row = BLOCK_X;
  if (at >= SIZE) return;
  const float gate = float(product[row * 2 * SIZE + at]), up = float(product[row * 2 * SIZE + SIZE + at]);
  const float grown = float(T(1.0f + float(T(PRECISE_EXP(ABS(gate))))));
  const float part = float(T(1.0f / grown));
  const float sigmoid = gate < 0 ? part : float(T(1.0f - part));
  gated[row * SIZE + at] = T(float(T(gate * sigmoid)) * up);
