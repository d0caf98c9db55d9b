#define DEVICE device
#define UNROLLED _Pragma("unroll")
#define SHARED threadgroup
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(x, lanes) simd_shuffle_xor(x, lanes)
#define EXP(x) metal::fast::exp(x)
#define PRECISE_EXP(x) metal::precise::exp(x)
#define MAX(a, b) metal::max(a, b)
#define TANH(x) metal::precise::tanh(x)
#define ABS(x) metal::abs(x)
