// Few rows times a weight, which is read once, quantized as it is packed, or plain.
//
// A warp multiplies 16 outputs by 16 inputs of 8 rows with one instruction, `mma.m16n8k16`. A thread reads 16 bytes
// of a weight's row, dequantizes them to the type of the activations, and takes the same inputs of the rows. The
// order of a sum's inputs is free, so neighbours need not lie beside each other. The warps of a block share the
// inputs, in an order that does not depend on the number of rows. So a row's result has the same bits beside any
// others.
//
// A block has TILES times 16 outputs of all rows. Inputs: x [rows, ...], `inputs` numbers a row; weight uint32
// [outputs, inputs * BITS / 32]; scales and biases [outputs, inputs / GROUP]. A plain weight [outputs, inputs], for
// which QUANTIZED is 0 and BITS 16, has the type of x and neither of these two. Output: y, `outputs` numbers a row.
// There are at most 8 * COLUMNS rows. A thread reads TAKEN inputs at once, and the four of an output make a step.
//
// If GATED, a weight has the outputs of a gate and behind them as many of `up`, and y has silu(gate) * up, each
// rounded first. A block then has half of its tiles from the gate and the other half from the same outputs of `up`.
  const int warp = THREAD / 32, lane = THREAD % 32, place = lane / 4, part = lane % 4;
  const int own = TILES / (1 + GATED);  // tiles of a block from the gate, or all
  const int rows = x_shape[0], outputs = weight_shape[0] / (1 + GATED);
  const int inputs = QUANTIZED ? weight_shape[1] * 32 / BITS : weight_shape[1];
  const int steps = inputs / (4 * TAKEN), first = BLOCK_X * 16 * own;
  float sums[TILES][COLUMNS][4];
  UNROLLED
  for (int tile = 0; tile < TILES; tile++)
    for (int column = 0; column < COLUMNS; column++)
      for (int e = 0; e < 4; e++) sums[tile][column][e] = 0;
  for (int step = warp; step < steps; step += WARPS) {
    const int start = (step * 4 + part) * TAKEN;
    Numbers<UINT, 4> words[TILES][2];
#if QUANTIZED
    UINT factors[TILES][2], offsets[TILES][2];
#endif
    UNROLLED
    for (int tile = 0; tile < TILES; tile++) {
      UNROLLED
      for (int side = 0; side < 2; side++) {
        const int output = MIN(first + tile % own * 16 + side * 8 + place, outputs - 1);
        const long at = (long)(tile / own * outputs + output) * inputs + start;
#if QUANTIZED
        words[tile][side] = *(const DEVICE Numbers<UINT, 4>*)(weight + at * BITS / 32);
        factors[tile][side] = repeat<T>(scales[at / GROUP]);
        offsets[tile][side] = repeat<T>(biases[at / GROUP]);
#else
        words[tile][side] = *(const DEVICE Numbers<UINT, 4>*)(weight + at);
#endif
      }
    }
    UNROLLED
    for (int eight = 0; eight < TAKEN / 8; eight++) {
      UINT right[COLUMNS][4];
      UNROLLED
      for (int column = 0; column < COLUMNS; column++) {
        const long row = MIN(column * 8 + place, rows - 1);
        const Numbers<UINT, 4> v = *(const DEVICE Numbers<UINT, 4>*)(x + row * inputs + start + eight * 8);
#if QUANTIZED
        UNROLLED
        for (int i = 0; i < 2; i++) {
          const UINT one = BITS == 4 ? v.x[i] : v.x[2 * i], two = BITS == 4 ? v.x[i + 2] : v.x[2 * i + 1];
          right[column][2 * i] = (one & 0xffff) | (two << 16);
          right[column][2 * i + 1] = (one >> 16) | (two & 0xffff0000);
        }
#else
        UNROLLED
        for (int i = 0; i < 4; i++) right[column][i] = v.x[i];
#endif
      }
      UNROLLED
      for (int tile = 0; tile < TILES; tile++) {
        UNROLLED
        for (int turn = 0; turn < 2; turn++) {
          UINT left[4];
          UNROLLED
          for (int i = 0; i < 4; i++) {
#if QUANTIZED
            const int side = i % 2, word = BITS == 4 ? eight : 2 * eight + turn;
            const int pair = BITS == 4 ? 2 * turn + i / 2 : i / 2;
            left[i] = widen<T, BITS>(
                words[tile][side].x[word], pair, factors[tile][side], offsets[tile][side]);
#else
            left[i] = words[tile][i % 2].x[2 * turn + i / 2];
#endif
          }
          UNROLLED
          for (int column = 0; column < COLUMNS; column++)
            multiply_tile(
                x, lane, sums[tile][column], left, right[column][2 * turn], right[column][2 * turn + 1]);
        }
      }
    }
  }
  // One half of the warps adds what the other has, until the first has all.
  SHARED float totals[WARPS / 2][TILES * 16][COLUMNS * 8];
  for (int most = WARPS / 2; most > 0; most /= 2) {
    UNROLLED
    for (int turn = 0; turn < 2; turn++) {
      const bool gives = turn == 0 && warp >= most && warp < 2 * most, takes = turn == 1 && warp < most;
      UNROLLED
      for (int tile = 0; tile < TILES; tile++)
        for (int column = 0; column < COLUMNS; column++)
          for (int e = 0; e < 4; e++) {
            const int output = tile * 16 + e / 2 * 8 + place, row = column * 8 + part * 2 + e % 2;
            if (gives) totals[warp - most][output][row] = sums[tile][column][e];
            if (takes) sums[tile][column][e] += totals[warp][output][row];
            if (takes && most == 1) totals[0][output][row] = sums[tile][column][e];
          }
      BARRIER;
    }
  }
  for (int i = THREAD; i < rows * 16 * own; i += 32 * WARPS) {
    const int output = i % (16 * own), row = i / (16 * own);
    if (first + output >= outputs) continue;
#if GATED
    const float gate = float(T(totals[0][output][row])), up = float(T(totals[0][16 * own + output][row]));
#include "silu.h"
#else
    const T number = T(totals[0][output][row]);
#endif
    y[(long)row * outputs + first + output] = number;
  }
