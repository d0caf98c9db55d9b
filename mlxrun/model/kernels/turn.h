// A block has TEAMS heads of a token, and 32 threads for each. Inputs: product [rows, n, (HEADS + 2 * KV_HEADS) * SIZE]
// of queries, keys and values; query_weight and key_weight [SIZE] of their norms; frequencies [TURNED / 2]; offsets
// int32 [rows * n]. Outputs: queries [rows, HEADS, n, SIZE]; written [2 * rows, KV_HEADS, n, SIZE], keys before values.
// The first TURNED numbers of a head are rotated in pairs, of neighbours or of the two halves.
  const int token = BLOCK_X, head = BLOCK_Y * TEAMS + THREAD / 32, lane = THREAD % 32;
  if (head >= HEADS + 2 * KV_HEADS) return;
  const int rows = product_shape[0], tokens = product_shape[1];
  const int row = token / tokens, place = token % tokens;
  const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
  const long from = ((long)token * (HEADS + 2 * KV_HEADS) + head) * SIZE;
  float first[PAIRS], second[PAIRS], total = 0;
  UNROLLED
  for (int n = 0; n < PAIRS; n++) {
    const int pair = n * 32 + lane;
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
    const int pair = n * 32 + lane;
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
      const float angle = POSITION_SCALE * float(offsets[token]) * inverse;
      const float cosine = COS(angle), sine = SIN(angle), a = first[n], b = second[n];
      first[n] = a * cosine - b * sine;
      second[n] = a * sine + b * cosine;
    }
#endif
    const T one = T(first[n]), two = T(second[n]);
    if (is_query) {
      const long to = (((long)row * HEADS + head) * tokens + place) * SIZE;
      queries[to + at] = one;
      queries[to + other] = two;
    } else {
      const int kv = head - HEADS - (is_value ? KV_HEADS : 0);
      const long to = (((long)(row + (is_value ? rows : 0)) * KV_HEADS + kv) * tokens + place) * SIZE;
      written[to + at] = one;
      written[to + other] = two;
    }
  }
