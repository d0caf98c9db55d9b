#define EXP2(x) exp2f(x)
#define COS(x) cosf(x)
#define SIN(x) sinf(x)
#define RSQRT(x) rsqrtf(x)
template <typename T, int N> __device__ void store(T* to, const Numbers<T, N>& from) {
  *(Numbers<T, N>*)to = from;
}
