// Few rows times a weight, which is read once, quantized as it is packed, or plain.
//
// A warp multiplies 16 outputs by 16 inputs of 8 rows with one instruction, `mma.m16n8k16`. A thread reads 16 bytes
// of a weight's row, dequantizes them to the type of the activations, and takes the same inputs of the rows. The
// order of a sum's inputs is free, so neighbours need not lie beside each other. The warps of a block share the
// inputs, in an order that does not depend on the number of rows. So a row's result has the same bits beside any
// others.
//
// A block has TILES times 16 outputs of all rows, and the last one SPARE outputs less. Inputs: x [rows, 1, inputs] or
// [rows, heads, 1, inputs / heads]; weight uint32 [outputs, inputs * BITS / 32]; scales and biases [outputs, inputs /
// GROUP]. A plain weight [outputs, inputs], for which QUANTIZED is 0 and BITS 16, has the type of x and neither of
// these two. Output: y, `outputs` numbers a row. There are at most 8 * COLUMNS rows. A thread reads TAKEN inputs at
// once, and the four of an output make a step. It reads the weights of AHEAD steps before it multiplies, since a
// block of few tiles waits for little else. With SETS of 2, a warp has the steps of two, one set after the other, and
// adds up their sums as two warps would: there are not enough registers for so many rows of twice the warps.
//
// If GATED, a weight has the outputs of a gate and behind them as many of `up`, and y has silu(gate) * up, each
// rounded first. A block then has half of its tiles from the gate and the other half from the same outputs of `up`. If
// ADDED, the product is rounded and added to `added`, `outputs` numbers a row.
//
// The shape of each input costs the host time in every launch. So there is one, and the grid has the outputs.
  const int warp = THREAD / 32, lane = THREAD % 32, place = lane / 4, part = lane % 4;
  const int own = TILES / (1 + GATED);  // tiles of a block from the gate, or all
  const int rows = x_shape[0], inputs = x_shape[1] * x_shape[x_ndim - 1];
  const int outputs = BLOCKS_X * 16 * own - SPARE;
  const int steps = inputs / (4 * TAKEN), first = BLOCK_X * 16 * own;
  float sums[TILES][COLUMNS][4], kept[TILES][COLUMNS][4];
  for (int set = 0; set < SETS; set++) {
    UNROLLED
    for (int tile = 0; tile < TILES; tile++)
      for (int column = 0; column < COLUMNS; column++)
        for (int e = 0; e < 4; e++) {
          if (set > 0) kept[tile][column][e] = sums[tile][column][e];
          sums[tile][column][e] = 0;
        }
    for (int begin = warp + set * WARPS; begin < steps; begin += AHEAD * SETS * WARPS) {
      Numbers<UINT, 4> words[AHEAD][TILES][2];
#if QUANTIZED
      UINT factors[AHEAD][TILES][2], offsets[AHEAD][TILES][2];
#endif
      UNROLLED
      for (int ahead = 0; ahead < AHEAD; ahead++) {
        const int fours = MIN(begin + ahead * SETS * WARPS, steps - 1) * 4 + part;
        UNROLLED
        for (int row = 0; row < TILES * 2; row++) {
          const int tile = row / 2, side = row % 2;
          const int output = MIN(first + tile % own * 16 + side * 8 + place, outputs - 1);
          const UINT from = tile / own * outputs + output;
          words[ahead][tile][side] = ((const DEVICE Numbers<UINT, 4>*)(weight))[from * (steps * 4) + fours];
#if QUANTIZED
          const UINT group = from * (inputs / GROUP) + fours * TAKEN / GROUP;
          factors[ahead][tile][side] = repeat<T>(scales[group]);
          offsets[ahead][tile][side] = repeat<T>(biases[group]);
#endif
        }
      }
      UNROLLED
      for (int each = 0; each < AHEAD * (TAKEN / 8); each++) {
        const int ahead = each / (TAKEN / 8), eight = each % (TAKEN / 8);
        const int step = begin + ahead * SETS * WARPS;
        if (step >= steps) continue;
        UINT right[COLUMNS][4];
        UNROLLED
        for (int column = 0; column < COLUMNS; column++) {
          const UINT row = MIN(column * 8 + place, rows - 1);
          const Numbers<UINT, 4> v =
              ((const DEVICE Numbers<UINT, 4>*)(x))[((row * steps + step) * 4 + part) * (TAKEN / 8) + eight];
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
                  words[ahead][tile][side].x[word], pair, factors[ahead][tile][side], offsets[ahead][tile][side]);
#else
              left[i] = words[ahead][tile][i % 2].x[2 * turn + i / 2];
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
  }
  if (SETS > 1) {
    UNROLLED
    for (int tile = 0; tile < TILES; tile++)
      for (int column = 0; column < COLUMNS; column++)
        for (int e = 0; e < 4; e++) sums[tile][column][e] += kept[tile][column][e];
  }
  // One half of the warps adds what the other has, until the first has all. The columns of neighbouring outputs change
  // places, so that the threads of a warp use different banks of the shared memory.
  SHARED float totals[WARPS / 2][TILES * 16][COLUMNS * 8];
  const int period = 4 / MIN(COLUMNS, 4);  // of outputs whose columns have the same places
  for (int most = WARPS / 2; most > 0; most /= 2) {
    UNROLLED
    for (int turn = 0; turn < 2; turn++) {
      const bool gives = turn == 0 && warp >= most && warp < 2 * most, takes = turn == 1 && warp < most;
      UNROLLED
      for (int tile = 0; tile < TILES; tile++)
        for (int column = 0; column < COLUMNS; column++)
          for (int side = 0; side < 2; side++) {
            const int output = tile * 16 + side * 8 + place;
            const int row = (column ^ (place / period % COLUMNS)) * 8 + part * 2;
            if (gives) STORE_PAIR(totals[warp - most][output], row, sums[tile][column], side * 2);
            if (takes) ADD_PAIR(sums[tile][column], side * 2, totals[warp][output], row);
            if (takes && most == 1) STORE_PAIR(totals[0][output], row, sums[tile][column], side * 2);
          }
      BARRIER;
    }
  }
  for (int i = THREAD; i < rows * 16 * own; i += 32 * WARPS) {
    const int output = i % (16 * own), row = i / (16 * own);
    const int held = row ^ (output % 8 / period % COLUMNS * 8);
    if (first + output >= outputs) continue;
#if GATED
    const float gate = float(T(totals[0][output][held])), up = float(T(totals[0][16 * own + output][held]));
#include "silu.h"
#else
    const T number = T(totals[0][output][held]);
#endif
    const long at = (long)row * outputs + first + output;
#if ADDED
    y[at] = T(float(added[at]) + float(number));
#else
    y[at] = number;
#endif
  }
