// Joins the results of a row's blocks, as in Flash-Decoding (Dao et al., 2023).
//
// Input: the parts of attention_split.h. Output: attended [rows, heads, 1, VALUE_DIM]; zeros for rows of no tokens.
// Each of TEAMS threads sums every TEAMS-th part.
  const int row = BLOCK_Y, head = BLOCK_X, d = THREAD % VALUE_DIM, team = THREAD / VALUE_DIM;
  const int length = lengths[row];
  const int low = (WINDOW > 0 && length > WINDOW) ? length - WINDOW : 0;
  const int splits = (length + PAGE_TOKENS - 1) / PAGE_TOKENS - low / PAGE_TOKENS;
  const DEVICE float* own = parts + ((long)row * NUM_HEADS + head) * parts_shape[2] * (VALUE_DIM + 2);
  SHARED float tops[TEAMS], all_weights[TEAMS], sums[TEAMS][VALUE_DIM];
  float highest = -1e30f, total = 0, weights = 0;
  for (int s = team; s < splits; s += TEAMS) highest = MAX(highest, own[s * (VALUE_DIM + 2) + VALUE_DIM]);
  for (int s = team; s < splits; s += TEAMS) {
    const DEVICE float* part = own + s * (VALUE_DIM + 2);
    const float c = EXP(part[VALUE_DIM] - highest);
    weights += part[VALUE_DIM + 1] * c;
    total += part[d] * c;
  }
  sums[team][d] = total;
  if (d == 0) { tops[team] = highest; all_weights[team] = weights; }
  BARRIER;
  if (team > 0) return;
  if (SINKS) highest = MAX(highest, float(sinks[head]));
  for (int t = 1; t < TEAMS; t++) highest = MAX(highest, tops[t]);
  total = 0; weights = SINKS ? EXP(float(sinks[head]) - highest) : 0.0f;
  for (int t = 0; t < TEAMS; t++) {
    const float c = EXP(tops[t] - highest);
    weights += all_weights[t] * c;
    total += sums[t][d] * c;
  }
  attended[((long)row * NUM_HEADS + head) * VALUE_DIM + d] = T(weights > 0 ? total / weights : 0.0f);
