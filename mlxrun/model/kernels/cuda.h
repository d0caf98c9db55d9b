#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_threadgroup threadIdx
#define threadgroups_per_grid gridDim
#define DEVICE
#define UNROLLED _Pragma("unroll")
#define SHARED __shared__ __align__(16)
#define BARRIER __syncthreads()
#define SHUFFLE_XOR(x, lanes) __shfl_xor_sync(0xffffffff, x, lanes)
#define EXP(x) __expf(x)
#define PRECISE_EXP(x) expf(x)
#define MAX(a, b) fmaxf(a, b)
#define TANH(x) tanhf(x)
#define ABS(x) fabsf(x)
