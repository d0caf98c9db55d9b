// A block has a row, and a thread WIDE numbers beside each other in each turn. Inputs: x and change [rows, SIZE],
// weight [SIZE]. Outputs: summed = x + change, and its norm, both [rows, SIZE].
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
