// The same by exchanges of a simdgroup, for tests: on Metal, the library's own product is used.
#define UINT uint
#define MIN(a, b) metal::min(a, b)
template <typename T> float read_half(uint pair, int i) {
  return float(as_type<T>(ushort(pair >> (16 * i))));
}
template <typename T> uint repeat(T number) { return uint(as_type<ushort>(number)) * 0x10001; }
template <typename T, int BITS> uint widen(uint word, int i, uint scale, uint bias) {
  uint both = 0;
  for (int h = 0; h < 2; h++) {
    const float q = float((word >> (BITS * i + 16 * h)) & ((1 << BITS) - 1));
    const T number = T(q * read_half<T>(scale, 0) + read_half<T>(bias, 0));
    both |= uint(as_type<ushort>(number)) << (16 * h);
  }
  return both;
}
template <typename T>
void multiply_tile(const device T*, int lane, thread float* c, const thread uint* a, uint b0, uint b1) {
  const int place = lane / 4, part = lane % 4;
  for (int from = 0; from < 4; from++)
    for (int word = 0; word < 2; word++)
      for (int half_of_c = 0; half_of_c < 2; half_of_c++) {
        const uint left = simd_shuffle(a[2 * word + half_of_c], ushort(place * 4 + from));
        for (int column = 0; column < 2; column++) {
          const uint right = simd_shuffle(word ? b1 : b0, ushort((part * 2 + column) * 4 + from));
          for (int i = 0; i < 2; i++)
            c[2 * half_of_c + column] += read_half<T>(left, i) * read_half<T>(right, i);
        }
      }
}
#define STORE_PAIR(to, i, from, j) (to)[i] = (from)[j], (to)[(i) + 1] = (from)[(j) + 1]
#define ADD_PAIR(to, i, from, j) (to)[i] += (from)[j], (to)[(i) + 1] += (from)[(j) + 1]
