// Attends to the tokens of a page, for one row and some heads that share a KV head.
//
// Inputs: queries [rows, heads, 1, KEY_DIM], keys [pages * PAGE, KV_HEADS, KEY_DIM], values alike, tables [rows,
// columns] of page numbers (page i of a row is in column i % columns), lengths [rows]. Output: parts [rows, heads,
// columns, VALUE_DIM + 2]: weighted sum, highest logit, weight. If JOINED, keys [2 * pages * PAGE, KV_HEADS, KEY_DIM]
// have the values behind them.
//
// In the latent form (multi-head latent attention, DeepSeek-V2, 2024) a token has a latent vector, which is key and
// value of all heads. So keys are latent vectors, values their rotary parts, and positions [rows, heads, 1, TURN_DIM].
// The product of a token's rotary part and `positions` is added to its logit.
//
// A token's position in its row alone decides which thread sums it, so no row's result depends on the rows beside it.
// Shapes are arguments of a launch; a number in an array of one stays in the host's memory on CUDA, where each read
// takes a microsecond.
#if LATENT
#define NUMBERS_READ TURN_PART
#define SUMMED k
#else
#define NUMBERS_READ VALUE_PART
#define SUMMED v
#endif
#if JOINED
  const DEVICE T* values = keys + (long)(keys_shape[0] / 2) * KV_HEADS * KEY_DIM;
#endif
  const int row = BLOCK_Z;
  const int kv = BLOCK_Y / PARTS;                   // KV head
  const int head0 = BLOCK_Y * HEADS;                // first query head of this block
  const int length = lengths[row];
  const int low = (WINDOW > 0 && length > WINDOW) ? length - WINDOW : 0;
  const int page_index = low / PAGE_TOKENS + BLOCK_X;
  const int page_start = page_index * PAGE_TOKENS;
  const int start = low > page_start ? low - page_start : 0;
  const int stop = length - page_start < PAGE_TOKENS ? length - page_start : PAGE_TOKENS;
  if (stop <= start) return;
  const int lane = THREAD % 32, warp = THREAD / 32;
  const int lane_of_key = lane % LANES, key_of_warp = lane / LANES;
  const int columns = BLOCKS_X;
  const long base = (long)tables[row * columns + page_index % columns] * PAGE_TOKENS;
  float q[HEADS][KEY_PART], sum[HEADS][VALUE_PART], top[HEADS], weight[HEADS];
#if LATENT
  float turned[HEADS][TURN_PART];
#endif
  UNROLLED
  for (int h = 0; h < HEADS; h++) {
    top[h] = -1e30f; weight[h] = 0;
    for (int i = 0; i < VALUE_PART; i++) sum[h][i] = 0;
    const long head = (long)row * NUM_HEADS + head0 + h;
    const long at = head * KEY_DIM + lane_of_key * KEY_PART;
    for (int i = 0; i < KEY_PART; i++) q[h][i] = float(queries[at + i]) * SCALE;
#if LATENT
    for (int i = 0; i < TURN_PART; i++)
      turned[h][i] = float(positions[head * TURN_DIM + lane_of_key * TURN_PART + i]);
#endif
  }
  const int tokens_a_turn = WARPS * KEYS_A_WARP * UNROLL;
  for (int turn = start / tokens_a_turn; turn * tokens_a_turn < stop; turn++) {
    Numbers<T, KEY_PART> k[UNROLL];
    Numbers<T, NUMBERS_READ> v[UNROLL];
    bool seen[UNROLL];
    for (int u = 0; u < UNROLL; u++) {
      const int token = turn * tokens_a_turn + (u * WARPS + warp) * KEYS_A_WARP + key_of_warp;
      seen[u] = token >= start && token < stop;
      const long own = ((base + (seen[u] ? token : start)) * KV_HEADS + kv) * LANES + lane_of_key;
      k[u] = *(const DEVICE Numbers<T, KEY_PART>*)(keys + own * KEY_PART);
      v[u] = *(const DEVICE Numbers<T, NUMBERS_READ>*)(values + own * NUMBERS_READ);
    }
    UNROLLED
    for (int h = 0; h < HEADS; h++) {
      float s[UNROLL];
      float highest = top[h];
      for (int u = 0; u < UNROLL; u++) {
        s[u] = 0;
        for (int i = 0; i < KEY_PART; i++) s[u] += q[h][i] * float(k[u].x[i]);
#if LATENT
        for (int i = 0; i < TURN_PART; i++) s[u] += turned[h][i] * float(v[u].x[i]);
#endif
      }
      for (int o = LANES / 2; o > 0; o /= 2)
        for (int u = 0; u < UNROLL; u++) s[u] += SHUFFLE_XOR(s[u], o);
#if CAPPED
      for (int u = 0; u < UNROLL; u++) s[u] = CAP * TANH(s[u] / CAP);
#endif
      for (int u = 0; u < UNROLL; u++) if (seen[u]) highest = MAX(highest, s[u]);
      const float shrink = EXP(top[h] - highest);
      top[h] = highest;
      weight[h] *= shrink;
      for (int i = 0; i < VALUE_PART; i++) sum[h][i] *= shrink;
      for (int u = 0; u < UNROLL; u++) {
        const float p = seen[u] ? EXP(s[u] - highest) : 0.0f;
        weight[h] += p;
        for (int i = 0; i < VALUE_PART; i++) sum[h][i] += p * float(SUMMED[u].x[i]);
      }
    }
  }
  for (int o = LANES; o < 32; o *= 2) {              // the keys that the warp had beside each other
    UNROLLED
    for (int h = 0; h < HEADS; h++) {
      const float other = SHUFFLE_XOR(top[h], o), highest = MAX(top[h], other);
      const float mine = EXP(top[h] - highest), theirs = EXP(other - highest);
      weight[h] = weight[h] * mine + SHUFFLE_XOR(weight[h], o) * theirs;
      for (int i = 0; i < VALUE_PART; i++)
        sum[h][i] = sum[h][i] * mine + SHUFFLE_XOR(sum[h][i], o) * theirs;
      top[h] = highest;
    }
  }
  SHARED float all_tops[WARPS][HEADS], all_weights[WARPS][HEADS], all_sums[WARPS][HEADS][VALUE_DIM];
  if (key_of_warp == 0) {
    UNROLLED
    for (int h = 0; h < HEADS; h++) {
      if (lane_of_key == 0) { all_tops[warp][h] = top[h]; all_weights[warp][h] = weight[h]; }
      for (int i = 0; i < VALUE_PART; i++) all_sums[warp][h][lane_of_key * VALUE_PART + i] = sum[h][i];
    }
  }
  BARRIER;
  for (int n = THREAD; n < HEADS * VALUE_DIM; n += WARPS * 32) {
    const int h = n / VALUE_DIM, d = n % VALUE_DIM;
    float highest = -1e30f, total = 0, weights = 0;
    for (int w = 0; w < WARPS; w++) highest = MAX(highest, all_tops[w][h]);
    for (int w = 0; w < WARPS; w++) {
      const float c = EXP(all_tops[w][h] - highest);
      total += all_sums[w][h][d] * c;
      weights += all_weights[w][h] * c;
    }
    const long part = ((long)row * NUM_HEADS + head0 + h) * columns + BLOCK_X;
    const long at = part * (VALUE_DIM + 2);
    parts[at + d] = total;
    if (d == 0) { parts[at + VALUE_DIM] = highest; parts[at + VALUE_DIM + 1] = weights; }
  }
