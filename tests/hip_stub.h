// What the kernels need of ROCm's <hip/hip_runtime.h>, declared here so that clang alone, without ROCm,
// compiles them for gfx942 and gfx90a, and so that the build's dry run goes through clang's real host code
// up to the launch. The device functions are written with the compiler's own built-ins, as ROCm's header
// does.
#pragma once
#include <stddef.h>
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((launch_bounds(threads)))

struct dim3 {
    unsigned x, y, z;
    constexpr __host__ __device__ dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
typedef int hipError_t;
typedef struct ihipStream_t* hipStream_t;
extern "C" hipError_t hipGetLastError();
extern "C" hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t shared, hipStream_t stream);
extern "C" hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, hipStream_t* stream);
extern "C" hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                      size_t shared, hipStream_t stream);
#define hipLaunchKernelGGL(kernel, ...) stub_launch((kernel), __VA_ARGS__)
#define stub_launch(kernel, grid, block, shared, stream, ...) \
    do { kernel<<<(grid), (block), (shared), (stream)>>>(__VA_ARGS__); } while (0)

struct stub_index { unsigned x; };
#define threadIdx (stub_index{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (stub_index{__builtin_amdgcn_workgroup_id_x()})

static __device__ inline void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
static __device__ inline unsigned long long __ballot(int vote) {
    return __builtin_amdgcn_uicmp(vote, 0, 33);  // 33: not equal
}
static __device__ inline int __shfl(int value, int lane) {
    return __builtin_amdgcn_ds_bpermute(lane << 2, value);
}
static __device__ inline float __shfl(float value, int lane) {
    return __builtin_bit_cast(float, __shfl(__builtin_bit_cast(int, value), lane));
}
static __device__ inline int __popcll(unsigned long long mask) { return __builtin_popcountll(mask); }
static __device__ inline int atomicAdd(int* where, int amount) {
    return __hip_atomic_fetch_add(where, amount, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
static __device__ inline float expf(float f) { return __builtin_expf(f); }
