// The vector type is aligned to the largest power of two that divides its size, at most 16 bytes.
template <typename T, int N> struct alignas(
    ((sizeof(T) * N) & (~(sizeof(T) * N) + 1)) > 16 ? 16 : ((sizeof(T) * N) & (~(sizeof(T) * N) + 1))
) Numbers { T x[N]; };
