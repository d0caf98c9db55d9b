#define EXP2(x) metal::exp2(x)
#define COS(x) metal::fast::cos(x)
#define SIN(x) metal::fast::sin(x)
#define RSQRT(x) metal::precise::rsqrt(x)
template <typename T, int N> void store(device T* to, const thread Numbers<T, N>& from) {
  for (int i = 0; i < N; i++) to[i] = from.x[i];
}
